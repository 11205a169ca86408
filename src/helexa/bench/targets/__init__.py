"""Servers to be measured: what they are, what they serve, and how they are told to load."""
