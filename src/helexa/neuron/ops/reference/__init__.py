"""Plain-torch implementation of all kernels."""
