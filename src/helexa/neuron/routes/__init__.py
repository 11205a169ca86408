"""The node's HTTP routes, one file per surface."""
