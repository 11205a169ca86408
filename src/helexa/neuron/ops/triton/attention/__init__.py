"""Attention kernels in Triton, and the layout of their KV cache."""
