"""The HTTP application of a node, its middleware and its health reports."""
