"""Triton kernels of the gated delta rule."""
