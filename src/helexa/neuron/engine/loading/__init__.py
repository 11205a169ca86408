"""Loads a model: chooses the device, estimates and requests memory, and reads the weights."""
