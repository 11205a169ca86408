"""Constants that the engine and all kernels share, without torch: the server process reads them, too."""

from typing import Literal

PAGE_SIZE = 64
"""Positions per page of the KV cache."""

MAX_DRAFTS = 16
"""Rows that speculation may add to a sequence."""

NON_FINITE = -1
"""Token id of a row whose largest logit is NaN or infinite."""

Kernels = Literal["auto", "torch", "triton"]
"""Which kernels an engine uses; `auto` takes the fastest that work."""
