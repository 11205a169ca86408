"""CPU kernels in C."""
