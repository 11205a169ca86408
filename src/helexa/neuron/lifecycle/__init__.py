"""Load and unload the models of a node, and restart crashed engines."""
