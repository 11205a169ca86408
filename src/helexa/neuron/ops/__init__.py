"""Kernels and what they work on: `choice` picks an implementation, `reference` is the plain-torch oracle."""
