"""Load, unload and recover the models of a node."""
