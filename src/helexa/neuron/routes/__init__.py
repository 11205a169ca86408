"""The HTTP routes of a node. Each module contains one group of endpoints."""
