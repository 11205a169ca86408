"""Picks the node that answers a request."""
