"""Runs steps of a model on a device."""
