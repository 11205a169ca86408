"""Constants that the engine and all kernels share.

This module does not import torch, because the server process, which runs without torch, imports it.
"""

from typing import Literal

from helexa.neuron.ops.kernel_header import CONSTANTS

PAGE_SIZE = CONSTANTS["PAGE_SIZE"]
"""Number of positions per page of the KV cache."""

# Constants of the native (C) kernels. The header `native/kernels/kernels.h` explains each constant.
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
MIXED = CONSTANTS["MIXED"]
RANK_STATE_BYTES = CONSTANTS["RANK_STATE_BYTES"]
RANK_TIME_OFFSET = CONSTANTS["RANK_TIME_OFFSET"]
STRETCH_GROUPS = CONSTANTS["STRETCH_GROUPS"]
SEGMENT_POSITIONS = CONSTANTS["SEGMENT_POSITIONS"]
SPARE_BLOCKS = CONSTANTS["SPARE_BLOCKS"]
SPLIT_ROWS = CONSTANTS["SPLIT_ROWS"]
FLOAT16, BFLOAT16, FLOAT32 = (CONSTANTS[name] for name in ("FLOAT16", "BFLOAT16", "FLOAT32"))
SILU, GELU_TANH, GELU = (CONSTANTS[name] for name in ("SILU", "GELU_TANH", "GELU"))

MAX_DRAFTS = 16
"""Maximum number of draft tokens that speculative decoding adds to a sequence in one step."""

NON_FINITE = CONSTANTS["NON_FINITE"]
"""Token id that sampling returns for a row if its largest logit is NaN or infinite."""

Kernels = Literal["auto", "torch", "triton"]
"""Names of the kernel implementations in the configuration; `auto` selects the fastest one that works."""
