"""Prefill and decode rates by context length, with and without prefix cache hits."""

from dataclasses import dataclass

from helexa.bench.results.archive import Archive
from helexa.bench.results.latest import LatestResult, by_group, latest

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
    results = [result for result in latest(archive, target=target, model=model, kinds=KINDS) if result.rows]
    for target_name, model_name, group in by_group(results):
        ladders: dict[str, list[LatestResult]] = {}
        for result in group:
            ladders.setdefault(ladder_kind(result), []).append(result)
        scalings += [_ladder(target_name, model_name, kind, steps) for kind, steps in ladders.items()]
    return scalings


def ladder_kind(result: LatestResult) -> str:
    """Return the kind of rates that a benchmark configuration measures.

    The kinds are `cold` (no prefix cache hit), `warm` (prefix cache hit) and `decode` (decoding after a cached
    context).
    """
    name_parts = result.scenario.split(":")
    return "decode" if result.kind == "decode" else "warm" if "warm" in name_parts else "cold"


def _ladder(target: str, model: str, kind: str, steps: list[LatestResult]) -> Scaling:
    points = sorted(
        (_point(result) for result in steps),
        key=lambda point: point.prompt_tokens or point.prompt_size or 0,
    )
    rates = [point.decode_tps for point in points if point.decode_tps]
    flatness = rates[-1] / rates[0] if len(rates) > 1 else None
    return Scaling(target, model, kind, steps[-1].build, points, flatness)


def _point(result: LatestResult) -> ScalingPoint:
    return ScalingPoint(
        scenario=result.scenario,
        prompt_size=result.param("prompt_tokens") or result.param("depth_tokens"),
        prompt_tokens=result.median("prompt_tokens"),
        cached_tokens=result.median("cached_tokens"),
        prefill_tps=result.median("prefill_tps"),
        decode_tps=result.median("output_tps_user"),
        ttft_s=result.median("ttft_s"),
        samples=len(result.rows),
        estimated=result.any("estimated"),
    )
