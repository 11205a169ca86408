"""Prefill and decode rates by context length, with and without prefix cache hits."""

from dataclasses import dataclass

from helexa.bench.results.archive import Archive
from helexa.bench.results.latest import LatestCell, by_group, latest

KINDS = ("single", "decode")


@dataclass(frozen=True, slots=True)
class ScalingPoint:
    """The metrics of the newest build at one context length, as medians over samples."""

    scenario: str
    prompt_size: int | None
    prompt_tokens: float | None
    cached_tokens: float | None
    prefill_tps: float | None
    decode_tps: float | None
    ttft_s: float | None
    samples: int
    estimated: bool


@dataclass(frozen=True, slots=True)
class Scaling:
    """Rates of a model at several context lengths.

    Attributes:
        kind: `cold` (no prefix cache hit), `warm` (prefix cache hit), or `decode` (decoding after a cached context).
        decode_flatness: decode rate at the largest context length divided by the decode rate at the smallest. None if
            there are fewer than two rates.
    """

    target: str
    model: str
    kind: str
    build: str
    points: list[ScalingPoint]
    decode_flatness: float | None


def scaling(archive: Archive, *, target: str | None = None, model: str | None = None) -> list[Scaling]:
    """Return the rates by context length for each target, model and kind of measurement.

    Args:
        archive: the result database.
        target: name of the only target to return, or None for all.
        model: name of the only model to return, or None for all.
    """
    scalings: list[Scaling] = []
    cells = [cell for cell in latest(archive, target=target, model=model, kinds=KINDS) if cell.rows]
    for target_name, model_name, group in by_group(cells):
        ladders: dict[str, list[LatestCell]] = {}
        for cell in group:
            ladders.setdefault(ladder_kind(cell), []).append(cell)
        scalings += [_ladder(target_name, model_name, kind, steps) for kind, steps in ladders.items()]
    return scalings


def ladder_kind(cell: LatestCell) -> str:
    """Return the kind of rates that a cell (benchmark configuration) measures.

    The kinds are `cold` (no prefix cache hit), `warm` (prefix cache hit) and `decode` (decoding after a cached
    context).
    """
    words = cell.scenario.split(":")
    return "decode" if cell.kind == "decode" else "warm" if "warm" in words else "cold"


def _ladder(target: str, model: str, kind: str, steps: list[LatestCell]) -> Scaling:
    points = sorted((_point(cell) for cell in steps), key=lambda point: point.prompt_tokens or point.prompt_size or 0)
    rates = [point.decode_tps for point in points if point.decode_tps]
    flatness = rates[-1] / rates[0] if len(rates) > 1 else None
    return Scaling(target, model, kind, steps[-1].build, points, flatness)


def _point(cell: LatestCell) -> ScalingPoint:
    return ScalingPoint(
        scenario=cell.scenario,
        prompt_size=cell.param("prompt_tokens") or cell.param("depth_tokens"),
        prompt_tokens=cell.median("prompt_tokens"),
        cached_tokens=cell.median("cached_tokens"),
        prefill_tps=cell.median("prefill_tps"),
        decode_tps=cell.median("output_tps_user"),
        ttft_s=cell.median("ttft_s"),
        samples=len(cell.rows),
        estimated=cell.any("estimated"),
    )
