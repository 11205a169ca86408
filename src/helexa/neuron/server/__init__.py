"""The HTTP application of a node."""
