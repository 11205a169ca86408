"""Loads a model: memory estimate, device choice, weights."""
