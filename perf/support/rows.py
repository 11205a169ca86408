"""Rows of throughput benchmarks. A row names one measurement, for example `decode@8` (8 sequences decode together).

This module uses only the standard library, because the scripts that measure other engines import it in environments
without helexa.
"""

import argparse
import itertools
import json
import random
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass

DECODE_CONTEXT = 64
DECODE_STEPS = 64
ROWS = "decode@1,decode@4,decode@8,decode@16,decode@32,prefill@512"

_TRIED_TWICE = 1024  # prompt length up to which a prefill is measured twice, because it is short
_TOKEN_IDS = range(1000, 30_000)  # in every measured vocabulary, these are tokens of text
_serial = itertools.count(1)


@dataclass(frozen=True)
class Row:
    """One measurement of a throughput benchmark, written as `decode@B`, `decode@B:C` or `prefill@N`.

    `decode@B:C` decodes B sequences that start with C tokens of context. `prefill@N` prefills a prompt of N tokens.

    Attributes:
        name: name of the row, for example `decode@8`.
        sequences: number of sequences that decode together; 0 for a prefill.
        context: number of prompt tokens of each sequence.
    """

    name: str
    sequences: int
    context: int

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
        if kind == "decode":
            return cls(name, int(first), int(depth) if colon else DECODE_CONTEXT)
        if kind == "prefill" and not colon:
            return cls(name, 0, int(first))
        raise argparse.ArgumentTypeError(f"'{name}' is no row; rows look like decode@4, decode@1:7700 or prefill@512")

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

    Raises:
        argparse.ArgumentTypeError: an entry is not the name of a row.
    """
    return [Row.parse(name) for name in names.split(",")]


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


def report(engine: str, row: Row, tok_s: float, **figures: object) -> None:
    """Print the JSON line with the result of a row."""
    print(json.dumps({"engine": engine, "row": row.name, "tok_s": round(tok_s, 1)} | figures), flush=True)


def measure_rows(
    engine: str, rows: Iterable[Row], decode: Callable[[Row], float], prefill: Callable[[Row], float]
) -> None:
    """Measure every row that the engine supports, and print a line for each.

    Args:
        engine: name of the engine in the output.
        rows: the rows to measure.
        decode: measures a decode row and returns its duration in seconds.
        prefill: measures a prefill row and returns its duration in seconds.
    """
    for row in rows:
        try:
            if row.sequences:
                rate = row.sequences * DECODE_STEPS / decode(row)
            else:
                rate = row.context / min(prefill(row) for _ in range(row.tries))
        except RuntimeError as error:
            print(f"{row.name}: {error}", file=sys.stderr)
            continue
        report(engine, row, rate)
