"""Quantization of weights during loading."""
