"""Chooses the node that answers a request."""
