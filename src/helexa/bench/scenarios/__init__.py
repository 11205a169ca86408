"""Loads with a name, one family to a file."""
