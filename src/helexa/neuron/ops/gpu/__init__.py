"""Kernels for GPUs: Triton kernels, and CUDA graphs of decode steps."""
