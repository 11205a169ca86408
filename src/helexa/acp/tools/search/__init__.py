"""Tools that search below a folder."""
