"""Triton's kernels run on the CPU here, in Triton's interpreter; it is chosen when they are first imported."""

import os

os.environ["TRITON_INTERPRET"] = "1"
