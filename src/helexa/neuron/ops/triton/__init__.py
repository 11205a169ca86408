"""Kernels in Triton, one kind to a file. Whoever imports them has Triton; `ops.gpu` is who does."""

import os

# A product and a sum round once. From 3.10 on Triton wants to be told, and 3.9 warns of that.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
