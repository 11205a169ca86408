"""Constants that the engine and all kernels share. The server process imports them, so torch is not needed."""

from typing import Literal

from helexa.neuron.ops.kernel_header import CONSTANTS

PAGE_SIZE = CONSTANTS["PAGE_SIZE"]
"""Positions per page of the KV cache."""

# Constants of the native kernels; see `kernels/kernels.h`.
ARGUMENT_BYTES = CONSTANTS["ARGUMENT_BYTES"]
BLOCK_BYTES = CONSTANTS["BLOCK_BYTES"]
EXCHANGE_BYTES = CONSTANTS["EXCHANGE_BYTES"]
FORMAT_COUNT = CONSTANTS["FORMAT_COUNT"]
GROUP = CONSTANTS["GROUP"]
LANES = CONSTANTS["LANES"]
MAX_DIM = CONSTANTS["MAX_DIM"]
MAX_EXPERTS = CONSTANTS["MAX_EXPERTS"]
MAX_QUERIES = CONSTANTS["MAX_QUERIES"]
MAX_RANKS = CONSTANTS["MAX_RANKS"]
RANK_STATE_BYTES = CONSTANTS["RANK_STATE_BYTES"]
STRETCH_GROUPS = CONSTANTS["STRETCH_GROUPS"]
SEGMENT_POSITIONS = CONSTANTS["SEGMENT_POSITIONS"]
SPARE_BLOCKS = CONSTANTS["SPARE_BLOCKS"]
SPLIT_ROWS = CONSTANTS["SPLIT_ROWS"]
FLOAT16, BFLOAT16, FLOAT32 = (CONSTANTS[name] for name in ("FLOAT16", "BFLOAT16", "FLOAT32"))
SILU, GELU_TANH = (CONSTANTS[name] for name in ("SILU", "GELU_TANH"))

MAX_DRAFTS = 16
"""Maximum number of rows that speculation adds to a sequence."""

NON_FINITE = CONSTANTS["NON_FINITE"]
"""Token id reported for a row whose largest logit is NaN or infinite."""

Kernels = Literal["auto", "torch", "triton"]
"""Kernels that an engine uses; `auto` selects the fastest that work."""
