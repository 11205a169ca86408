"""Figures of several engines on the same rows: medians, spreads and ratios, as a snapshot and as a table."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

OURS = "helexa"
WIDE_SPREAD = 0.15


@dataclass(frozen=True)
class Figures:
    """One engine's figures on one row, in the order of the turns."""

    values: list[float] = field(default_factory=list[float])

    @property
    def median(self) -> float:
        """The median."""
        return median(self.values)

    @property
    def wide(self) -> bool:
        """Whether the spread is too large for a reliable result."""
        return max(self.values) - min(self.values) > WIDE_SPREAD * self.median

    def snapshot(self) -> dict[str, Any]:
        """Return all figures for JSON."""
        return {
            "median": round(self.median, 3),
            "min": min(self.values),
            "max": max(self.values),
            "wide": self.wide,
            "values": self.values,
        }


class Comparison:
    """Collects JSON lines (see `engine.py`) in any order.

    Attributes:
        rows: row -> engine -> tokens per second, one value per turn.
        ceilings: row -> helexa's limit by memory bandwidth, one value per turn; decode rows only.
        shares: row -> helexa's rate divided by the turn's ceiling, one value per turn.
    """

    def __init__(self, lines: Iterable[Mapping[str, Any]] = ()) -> None:
        self.rows: dict[str, dict[str, Figures]] = {}
        self.ceilings: dict[str, Figures] = {}
        self.shares: dict[str, Figures] = {}
        for line in lines:
            self.add(line)

    def add(self, line: Mapping[str, Any]) -> None:
        """Add one line."""
        row, rate = line["row"], line["tok_s"]
        self.rows.setdefault(row, {}).setdefault(line["engine"], Figures()).values.append(rate)
        if "ceiling_tok_s" in line:
            ceiling = line["ceiling_tok_s"]
            self.ceilings.setdefault(row, Figures()).values.append(ceiling)
            self.shares.setdefault(row, Figures()).values.append(round(rate / ceiling, 4))

    @property
    def engines(self) -> list[str]:
        """Return all engines, helexa first."""
        return sorted({engine for row in self.rows.values() for engine in row}, key=lambda name: (name != OURS, name))

    def ratios(self, row: str) -> dict[str, float]:
        """Return helexa's median divided by each peer's median on one row; empty if a figure is missing."""
        figures = self.rows[row]
        if OURS not in figures:
            return {}
        return {engine: figures[OURS].median / figures[engine].median for engine in figures if engine != OURS}

    def snapshot(self) -> dict[str, Any]:
        """Return row -> figures, ratios and ceiling, for JSON."""
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
        return rows

    def table(self) -> str:
        """Return a Markdown table: medians, ratios, and helexa's share of the ceiling.

        A star marks figures with a large spread.
        """
        peers = [engine for engine in self.engines if engine != OURS]
        best = ["/ best peer"] if len(peers) > 1 else []
        head = ["Row", *self.engines, *(f"/ {peer}" for peer in peers), *best, "of the ceiling"]
        lines = [head, ["---"] * len(head)]
        for row, figures in self.rows.items():
            ratios = self.ratios(row)
            cells = [f"`{row}`", *(_cell(figures.get(engine)) for engine in self.engines)]
            cells += [_ratio(ratios.get(peer)) for peer in peers]
            cells += [_ratio(min(ratios.values(), default=None)) for _ in best]
            cells.append(f"{self.shares[row].median:.0%}" if row in self.shares else "")
            lines.append(cells)
        return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _cell(figures: Figures | None) -> str:
    return "" if figures is None else f"{figures.median:.1f}{' *' * figures.wide}"


def _ratio(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}"
