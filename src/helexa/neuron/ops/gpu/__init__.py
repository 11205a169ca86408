"""GPU kernels: Triton and captured graphs."""
