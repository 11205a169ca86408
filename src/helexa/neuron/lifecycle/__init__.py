"""The models of a node: loading, unloading, recovery."""
