"""Forwards requests to nodes, and the responses of nodes to clients."""
