"""A conversation on the terminal."""
