"""CPU kernels in C, which helexa compiles on the machine on first use."""
