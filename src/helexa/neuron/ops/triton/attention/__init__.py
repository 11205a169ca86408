"""Attention kernels and the KV cache."""
