"""Collects the measurements of several engines, and formats medians and ratios as JSON and as a Markdown table.

A row is one measurement, such as `decode@8` (see `rows`). A turn is one repetition of all measurements.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

OURS = "helexa"
WIDE_SPREAD = 0.15


@dataclass(frozen=True)
class Figures:
    """The measurements of one engine for one row, for example the decode rate at batch size 8: one value per turn."""

    values: list[float] = field(default_factory=list[float])

    @property
    def median(self) -> float:
        return median(self.values)

    @property
    def wide(self) -> bool:
        """Whether the spread of the values is too large for a reliable result."""
        return max(self.values) - min(self.values) > WIDE_SPREAD * self.median

    def snapshot(self) -> dict[str, Any]:
        """Return the values, their median, minimum and maximum, and `wide` as a JSON object."""
        return {
            "median": round(self.median, 3),
            "min": min(self.values),
            "max": max(self.values),
            "wide": self.wide,
            "values": self.values,
        }


class Comparison:
    """Collects the output lines of the scripts that measure engines (see `engine.py`).

    Attributes:
        rows: rates in tokens per second, by row (such as `decode@8`) and engine, one value per turn.
        ceilings: highest decode rate that memory bandwidth allows helexa, by row, one value per turn. Only decode rows
            have a ceiling.
        shares: helexa's rate divided by the ceiling, by row, one value per turn.
        greedy_shares: helexa's rate with random sampling divided by its rate without, by row, one value per turn. Only
            sampled rows have one.
    """

    def __init__(self, lines: Iterable[Mapping[str, Any]] = ()) -> None:
        self.rows: dict[str, dict[str, Figures]] = {}
        self.ceilings: dict[str, Figures] = {}
        self.shares: dict[str, Figures] = {}
        self.greedy_shares: dict[str, Figures] = {}
        for line in lines:
            self.add(line)

    def add(self, line: Mapping[str, Any]) -> None:
        """Add an output line: the measurement of one row by one engine."""
        row, rate = line["row"], line["tok_s"]
        self.rows.setdefault(row, {}).setdefault(line["engine"], Figures()).values.append(rate)
        if "ceiling_tok_s" in line:
            ceiling = line["ceiling_tok_s"]
            self.ceilings.setdefault(row, Figures()).values.append(ceiling)
            self.shares.setdefault(row, Figures()).values.append(round(rate / ceiling, 4))
        if "share_of_greedy" in line:
            self.greedy_shares.setdefault(row, Figures()).values.append(line["share_of_greedy"])

    @property
    def engines(self) -> list[str]:
        """Names of all measured engines, helexa first."""
        return sorted({engine for row in self.rows.values() for engine in row}, key=lambda name: (name != OURS, name))

    def ratios(self, row: str) -> dict[str, float]:
        """Return helexa's median of a row divided by each other engine's. Empty if helexa has not measured the row."""
        figures = self.rows[row]
        if OURS not in figures:
            return {}
        return {engine: figures[OURS].median / figures[engine].median for engine in figures if engine != OURS}

    def snapshot(self) -> dict[str, Any]:
        """Return all measurements and ratios by row as a JSON object."""
        rows: dict[str, Any] = {}
        for row, figures in self.rows.items():
            rows[row] = {
                "tok_s": {engine: row_figures.snapshot() for engine, row_figures in figures.items()},
                "ratios": {engine: round(ratio, 3) for engine, ratio in self.ratios(row).items()},
            }
            if row in self.ceilings:
                rows[row] |= {
                    "ceiling_tok_s": self.ceilings[row].snapshot(),
                    "share_of_ceiling": self.shares[row].snapshot(),
                }
            if row in self.greedy_shares:
                rows[row]["share_of_greedy"] = self.greedy_shares[row].snapshot()
        return rows

    def table(self) -> str:
        """Return a Markdown table with a line per row: medians, ratios, and helexa's share of the ceiling.

        A star marks medians of values with a large spread.
        """
        peers = [engine for engine in self.engines if engine != OURS]
        others = [engine for engine in peers if not engine.startswith(f"{OURS} ")]  # no versions of helexa
        best = ["/ best peer"] if len(others) > 1 else []
        greedy = ["of greedy"] if self.greedy_shares else []
        head = ["Row", *self.engines, *(f"/ {peer}" for peer in peers), *best, "of the ceiling", *greedy]
        lines = [head, ["---"] * len(head)]
        for row, figures in self.rows.items():
            ratios = self.ratios(row)
            cells = [f"`{row}`", *(_cell(figures.get(engine)) for engine in self.engines)]
            cells += [_ratio(ratios.get(peer)) for peer in peers]
            cells += [_ratio(min((ratios[peer] for peer in others if peer in ratios), default=None)) for _ in best]
            cells.append(f"{self.shares[row].median:.0%}" if row in self.shares else "")
            cells += [f"{self.greedy_shares[row].median:.1%}" if row in self.greedy_shares else "" for _ in greedy]
            lines.append(cells)
        return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _cell(figures: Figures | None) -> str:
    return "" if figures is None else f"{figures.median:.1f}{' *' * figures.wide}"


def _ratio(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}"
