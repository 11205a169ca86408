"""Servers to measure: reading their build, hardware and models, and loading models."""
