"""CUDA kernels: Triton and captured graphs."""
