"""Sends requests to nodes: the proxy, calls other than generation, and waiting for loads."""
