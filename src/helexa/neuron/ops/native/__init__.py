"""CPU kernels in C, which are compiled on first use."""
