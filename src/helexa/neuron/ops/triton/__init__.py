"""Kernels in Triton, one kind to a file. Whoever imports them has Triton; `ops.gpu` is who does."""
