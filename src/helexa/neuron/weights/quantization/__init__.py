"""Quantization at load."""
