"""Servers to measure: identity, models, and control of loads."""
