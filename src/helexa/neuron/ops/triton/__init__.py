"""Kernels for GPUs, in Triton and plain torch."""

import os

# Enable fused multiply-add. Triton 3.10 requires this setting, and Triton 3.9 warns without it.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
