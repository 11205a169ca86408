"""Loads a model: device, memory estimate and request, weights."""
