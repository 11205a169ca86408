"""Constants that the engine and all kernels share, without torch: the server process reads them, too."""

from typing import Literal

from helexa.neuron.ops.kernel_header import CONSTANTS

PAGE_SIZE = CONSTANTS["PAGE_SIZE"]
"""Positions per page of the KV cache."""

# Of the native kernels; `kernels/kernels.h` explains them.
ARGUMENT_BYTES = CONSTANTS["ARGUMENT_BYTES"]
BLOCK_BYTES = CONSTANTS["BLOCK_BYTES"]
FORMAT_COUNT = CONSTANTS["FORMAT_COUNT"]
GROUP = CONSTANTS["GROUP"]
LANES = CONSTANTS["LANES"]
MAX_DIM = CONSTANTS["MAX_DIM"]
MAX_EXPERTS = CONSTANTS["MAX_EXPERTS"]
MAX_QUERIES = CONSTANTS["MAX_QUERIES"]
SPAN_GROUPS = CONSTANTS["SPAN_GROUPS"]
SPAN_POSITIONS = CONSTANTS["SPAN_POSITIONS"]
SPARE_BLOCKS = CONSTANTS["SPARE_BLOCKS"]
SPLIT_ROWS = CONSTANTS["SPLIT_ROWS"]
FLOAT16, BFLOAT16, FLOAT32 = (CONSTANTS[name] for name in ("FLOAT16", "BFLOAT16", "FLOAT32"))
SILU, GELU_TANH = (CONSTANTS[name] for name in ("SILU", "GELU_TANH"))

MAX_DRAFTS = 16
"""Rows that speculation may add to a sequence."""

NON_FINITE = CONSTANTS["NON_FINITE"]
"""Token id of a row whose largest logit is NaN or infinite."""

Kernels = Literal["auto", "torch", "triton"]
"""Which kernels an engine uses; `auto` takes the fastest that work."""
