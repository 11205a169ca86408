"""Rows of throughput benchmarks. The module uses only the standard library, since the peers' scripts import it."""

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

_TRIED_TWICE = 1024  # the better of two tries counts for prefills up to this length, which are short
_TOKEN_IDS = range(1000, 30_000)  # ordinary tokens in every measured vocabulary
_serial = itertools.count(1)


@dataclass(frozen=True)
class Row:
    """A benchmark row: `decode@B` or `decode@B:C` (B sequences from C context tokens on), or `prefill@N`.

    `prefill@N` is a prompt of N tokens.

    Attributes:
        name: name as given on the command line.
        sequences: number of sequences that decode together; 0 for a prefill.
        context: number of tokens of each prompt.
    """

    name: str
    sequences: int
    context: int

    @classmethod
    def parse(cls, name: str) -> "Row":
        """Parse one row's name.

        Raises:
            argparse.ArgumentTypeError: `name` is not a row.
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
        """Positions of the KV cache that the row needs for all sequences, with a margin."""
        return max(self.sequences, 1) * (self.context + DECODE_STEPS + 1)

    @property
    def tries(self) -> int:
        """Number of tries of a prefill; the best try counts."""
        return 2 if self.context <= _TRIED_TWICE else 1


def parse_rows(names: str) -> list[Row]:
    """Parse a comma-separated list of rows.

    Raises:
        argparse.ArgumentTypeError: an entry is not a row.
    """
    return [Row.parse(name) for name in names.split(",")]


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return the command line parser shared by all engines' scripts: MODEL, `--rows` and `--threads`."""
    argument_parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    argument_parser.add_argument("model")
    argument_parser.add_argument("--rows", type=parse_rows, default=parse_rows(ROWS))
    argument_parser.add_argument("--threads", type=int, default=0, help="0 leaves it to the engine")
    return argument_parser


def prompt(length: int) -> list[int]:
    """Return a new prompt that shares no prefix with earlier prompts; the prompts are equal in each process."""
    return random.Random(next(_serial)).choices(_TOKEN_IDS, k=length)


def report(engine: str, row: Row, tok_s: float, **figures: object) -> None:
    """Print a row's JSON line."""
    print(json.dumps({"engine": engine, "row": row.name, "tok_s": round(tok_s, 1)} | figures), flush=True)


def measure_rows(
    engine: str, rows: Iterable[Row], decode: Callable[[Row], float], prefill: Callable[[Row], float]
) -> None:
    """Measure and report every row that the engine supports; `decode` and `prefill` return seconds."""
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
