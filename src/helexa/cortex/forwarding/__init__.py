"""Sends requests to nodes: the proxy, calls beside generation, waiting for loads."""
