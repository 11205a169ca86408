"""Layers from which the models are built."""
