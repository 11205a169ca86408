"""Rows of throughput benchmarks. A row names one measurement, for example `decode@8` (8 sequences decode together).

Rows of kind `sampled` measure decoding with the settings of most chat clients; the other rows decode greedily.

This module uses only the standard library, because the scripts that measure other engines import it in environments
without helexa.
"""

import argparse
import itertools
import json
import random
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

DECODE_CONTEXT = 64
DECODE_STEPS = 64
ROWS = "decode@1,decode@4,decode@8,decode@16,decode@32,sampled@1,sampled@4,sampled@16,prefill@512"
TEMPERATURE, TOP_P, TOP_K = 0.8, 0.9, 40  # of the rows of kind `sampled`

_TRIED_TWICE = 1024  # prompt length up to which a prefill is measured twice, because it is short
_TOKEN_IDS = range(1000, 30_000)  # in every measured vocabulary, these are tokens of text
_serial = itertools.count(1)


@dataclass(frozen=True)
class Row:
    """One measurement of a throughput benchmark, written as `decode@B:C`, `sampled@B:C` or `prefill@N`.

    `decode@B:C` decodes B sequences that start with C tokens of context, greedily. `sampled@B:C` does the same, but the
    engine's sampler draws each token with `TEMPERATURE`, `TOP_P` and `TOP_K`. In both, `:C` may be missing.
    `prefill@N` prefills a prompt of N tokens.

    Attributes:
        name: name of the row, for example `decode@8`.
        sequences: number of sequences that decode together; 0 for a prefill.
        context: number of prompt tokens of each sequence.
        sampled: whether tokens are drawn at random.
        prefill_row: name of the prefill row that the prompt of this decode row measures too; empty if there is none.
    """

    name: str
    sequences: int
    context: int
    sampled: bool = False
    prefill_row: str = ""

    @classmethod
    def parse(cls, name: str) -> "Row":
        """Parse the name of a row, such as `decode@8:7700`, and return the row.

        Raises:
            argparse.ArgumentTypeError: `name` is not the name of a row.
        """
        kind, _, size = name.partition("@")
        first, colon, depth = size.partition(":")
        numbers = [first, depth] if colon else [first]
        if not all(number.isdecimal() and int(number) > 0 for number in numbers):
            kind = ""
        if kind in ("decode", "sampled"):
            return cls(name, int(first), int(depth) if colon else DECODE_CONTEXT, sampled=kind == "sampled")
        if kind == "prefill" and not colon:
            return cls(name, 0, int(first))
        rows = "decode@4, decode@1:7700, sampled@4 or prefill@512"
        raise argparse.ArgumentTypeError(f"'{name}' is no row; rows look like {rows}")

    @property
    def positions(self) -> int:
        """Number of KV cache positions that all sequences of the row need together, with a margin."""
        return max(self.sequences, 1) * (self.context + DECODE_STEPS + 1)

    @property
    def tries(self) -> int:
        """How often a prefill row is measured. The fastest measurement counts."""
        return 2 if self.context <= _TRIED_TWICE else 1


def parse_rows(names: str) -> list[Row]:
    """Parse a comma-separated list of names of rows.

    A long prompt takes minutes. If the list has `prefill@C` and a decode row of one sequence with the same long context
    C, the list that the function returns has only the decode row, whose prompt measures both.

    Raises:
        argparse.ArgumentTypeError: an entry is not the name of a row.
    """
    rows = {name: Row.parse(name) for name in names.split(",")}
    for name, row in list(rows.items()):
        prefill = f"prefill@{row.context}"
        is_decode = row.sequences == 1 and not row.sampled
        if is_decode and row.context > _TRIED_TWICE and rows.pop(prefill, None):
            rows[name] = replace(row, prefill_row=prefill)
    return list(rows.values())


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return a command line parser with the common options of scripts that measure an engine: MODEL, rows, threads."""
    argument_parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    argument_parser.add_argument("model")
    argument_parser.add_argument("--rows", type=parse_rows, default=parse_rows(ROWS))
    argument_parser.add_argument("--threads", type=int, default=0, help="0 leaves it to the engine")
    return argument_parser


def prompt(length: int) -> list[int]:
    """Return random token ids that share no prefix with earlier prompts of this process.

    All processes generate the same sequence of prompts.
    """
    return random.Random(next(_serial)).choices(_TOKEN_IDS, k=length)


def report(engine: str, row: str, tok_s: float, **figures: object) -> None:
    """Print the JSON line with the result of the row with the name `row`."""
    print(json.dumps({"engine": engine, "row": row, "tok_s": round(tok_s, 1)} | figures), flush=True)


def measure_rows(engine: str, rows: Iterable[Row], measure: Callable[[Row], tuple[float, float]]) -> None:
    """Measure every row that the engine supports, and print a line for each.

    Args:
        engine: name of the engine in the output.
        rows: the rows to measure.
        measure: runs the prompts of a row and then its decode steps, if the row has any. It returns both durations in
            seconds.
    """
    for row in rows:
        try:
            prefill, decode = measure(row)
            if not row.sequences:
                prefill = min([prefill, *(measure(row)[0] for _ in range(1, row.tries))])
        except RuntimeError as error:
            print(f"{row.name}: {error}", file=sys.stderr)
            continue
        if row.sequences:
            report(engine, row.name, row.sequences * DECODE_STEPS / decode)
        if not row.sequences or row.prefill_row:
            report(engine, row.prefill_row or row.name, row.context / prefill)
