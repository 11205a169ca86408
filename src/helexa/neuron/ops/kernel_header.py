"""Constants and structs of the C kernels, read from the header `kernels.h`.

The header may contain `#define`s of integers, structs of numbers and pointers, and the lines that `_IGNORED` matches.
The parser raises an error for all other lines.
"""

import re
from pathlib import Path
from typing import Literal, NamedTuple

_PATH = Path(__file__).parent / "native" / "kernels" / "kernels.h"
_COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
_IGNORED = r"#(?:ifndef|define) KERNELS_H\n|#endif|#include <stdint.h>|#define nullable\s|typedef uint16_t bfloat16;"
_CONSTANT = r"#define (?P<name>\w+) (?P<value>-?\d+)\s"
_STRUCT = r"typedef struct \{(?P<fields>[^{}]*)\} (?P<struct>\w+);"
_DECLARATION = re.compile(rf"\s*(?:{_CONSTANT}|{_STRUCT}|{_IGNORED})")
_FIELDS = re.compile(r"\s*(?:const )?(?P<type>\w+) (?P<names>[^;]+);")
_NAME = re.compile(r"\s*(?P<pointer>\*(?P<nullable>nullable )?)?(?P<name>\w+)")


class Field(NamedTuple):
    """A field of a struct in the header `kernels.h`: a number or a pointer."""

    name: str
    type: str  # C type of the number, or of the pointer's target
    pointer: bool  # whether the field is a pointer
    nullable: bool  # whether the pointer may be null


def _parse(text: str) -> tuple[dict[str, int], dict[str, list[Field]]]:
    """Return a header's constants by name, and the structs' fields by struct name.

    Raises:
        ValueError: the header contains an unsupported line; the message quotes the line.
    """
    constants: dict[str, int] = {}
    structs: dict[str, list[Field]] = {}
    for declaration in _consecutive(_DECLARATION, _COMMENT.sub(" ", text)):
        if declaration["name"]:
            constants[declaration["name"]] = int(declaration["value"])
        if declaration["struct"]:
            structs[declaration["struct"]] = [
                Field(name["name"], fields["type"], bool(name["pointer"]), bool(name["nullable"]))
                for fields in _consecutive(_FIELDS, declaration["fields"])
                for declarator in fields["names"].split(",")
                for name in _consecutive(_NAME, declarator)
            ]
    return constants, structs


def _consecutive(pattern: re.Pattern[str], text: str) -> list[re.Match[str]]:
    """Return the matches of `pattern` that, one after another, cover all of `text`.

    Raises:
        ValueError: a part of `text` does not match.
    """
    text, end, matches = text.rstrip(), 0, list[re.Match[str]]()
    while end < len(text):
        match = pattern.match(text, end)
        if match is None:
            raise ValueError(f"kernels.h: cannot read the declaration {text[end:].strip().splitlines()[0]!r}")
        matches.append(match)
        end = match.end()
    return matches


CONSTANTS, STRUCTS = _parse(_PATH.read_text())

PAGE_SIZE = CONSTANTS["PAGE_SIZE"]  # Number of positions per page of the KV cache

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
SILU, GELU_TANH, GELU, RELU2 = (CONSTANTS[name] for name in ("SILU", "GELU_TANH", "GELU", "RELU2"))

# Number of arrays, each as long as a row of logits, that a thread of the native kernels allocates to sample a token
# (kernels/sampling.c).
SAMPLED_ARRAYS = 5

MAX_DRAFTS = 16  # Maximum number of draft tokens that speculative decoding adds to a sequence in one step

NON_FINITE = CONSTANTS["NON_FINITE"]  # Token id that sampling returns for a row if its largest logit is NaN or infinite

# Names of the kernel implementations in the configuration; `auto` selects the fastest one that works.
Kernels = Literal["auto", "torch", "triton"]
