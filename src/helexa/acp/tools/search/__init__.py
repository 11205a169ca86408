"""Tools that search the files in a folder and its subfolders."""
