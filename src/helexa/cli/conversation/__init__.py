"""A conversation with a model on the terminal."""
