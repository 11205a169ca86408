"""What a throughput benchmark is asked to measure. Needs nothing but Python: the peers' scripts import it, too."""

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

_TRIED_TWICE = 1024  # a prefill up to this long is over so soon that the better of two tries counts
_TOKEN_IDS = range(1000, 30_000)  # ordinary tokens in every vocabulary that is measured
_serial = itertools.count(1)


@dataclass(frozen=True)
class Row:
    """`decode@B` or `decode@B:C`: B sequences decode from C tokens of context on; `prefill@N`: a prompt of N tokens.

    Attributes:
        name: as it was written.
        sequences: that decode together; 0 for a prefill.
        context: tokens of each prompt.
    """

    name: str
    sequences: int
    context: int

    @classmethod
    def parse(cls, name: str) -> "Row":
        """Read one row's name.

        Raises:
            argparse.ArgumentTypeError: it is none.
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
        """Positions of KV cache that the row fills, all sequences together, with some room."""
        return max(self.sequences, 1) * (self.context + DECODE_STEPS + 1)

    @property
    def tries(self) -> int:
        """How often a prefill is measured; the best counts."""
        return 2 if self.context <= _TRIED_TWICE else 1


def parse_rows(names: str) -> list[Row]:
    """Read a comma-separated list of rows.

    Raises:
        argparse.ArgumentTypeError: one of them is none.
    """
    return [Row.parse(name) for name in names.split(",")]


def parser(description: str | None) -> argparse.ArgumentParser:
    """The command line that every engine's script has: MODEL, `--rows` and `--threads`."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("model")
    made.add_argument("--rows", type=parse_rows, default=parse_rows(ROWS))
    made.add_argument("--threads", type=int, default=0, help="0 leaves it to the engine")
    return made


def prompt(length: int) -> list[int]:
    """A prompt that no call before it returned, so that nothing of it can be cached; each process gets the same."""
    return random.Random(next(_serial)).choices(_TOKEN_IDS, k=length)


def report(engine: str, row: Row, tok_s: float, **more: object) -> None:
    """Print a row's JSON line."""
    print(json.dumps({"engine": engine, "row": row.name, "tok_s": round(tok_s, 1)} | more), flush=True)


def measure_rows(
    engine: str, rows: Iterable[Row], decode: Callable[[Row], float], prefill: Callable[[Row], float]
) -> None:
    """Measure and report every row that the engine can do; `decode` and `prefill` return seconds."""
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
