"""Rates and latencies by load (capacity) and by context length (scaling).

The knee is the highest load at which no requests are rejected and latency is still low. The Pareto front consists of
the loads with the best trade-offs between total throughput and rate per user.
"""

from dataclasses import dataclass, replace

from helexa.bench.results.archive import Archive
from helexa.bench.results.latest_results import LatestResult, by_group, latest

KNEE_FACTOR = 2
LOAD_KINDS = ("concurrency", "rate")


@dataclass(frozen=True, slots=True)
class CapacityPoint:
    """The metrics of the newest build at one load, as medians over samples.

    Attributes:
        load: number of requests in flight (closed loop), or requests sent per second (open loop).
        decode_tps: decode rate of one user in tokens per second. `output_tps` is the total of all users.
        pareto: True if this load is on the Pareto front: at every other load, `decode_tps` or `output_tps` is lower, or
            both are equal. False if one of the two rates is None.
    """

    scenario: str
    load: float
    concurrency: int | None
    rate_rps: float | None
    decode_tps: float | None
    output_tps: float | None
    tpot_s: float | None
    ttft_s: float | None
    ttft_p95_s: float | None
    queue_wait_ms: float | None
    goodput_rps: float | None
    goodput_share: float | None
    reject_rate: float | None
    samples: int
    estimated: bool
    pareto: bool = False


@dataclass(frozen=True, slots=True)
class Capacity:
    """The metrics of a model on a target at all loads of one kind.

    Attributes:
        loop: `closed` (fixed concurrency) or `open` (fixed request rate).
        build: label of the build of one point. Other points may be of another build.
        points: metrics at each load, lowest load first.
        knee: highest load at which no requests are rejected and TTFT is still low (see the function `knee`). None if
            unknown.
        knee_concurrency: the knee if `loop` is `closed`, else None.
    """

    target: str
    model: str
    loop: str
    build: str
    points: list[CapacityPoint]
    knee: float | None
    knee_concurrency: int | None


def capacity(archive: Archive, *, target: str | None = None, model: str | None = None) -> list[Capacity]:
    """Return the metrics by load for each target, model and kind of loop.

    Args:
        archive: the result database.
        target: name of the only target to return, or None for all.
        model: name of the only model to return, or None for all.
    """
    curves: list[Capacity] = []
    results = [result for result in latest(archive, target=target, model=model, kinds=LOAD_KINDS) if result.rows]
    for target_name, model_name, group in by_group(results):
        for kind in LOAD_KINDS:
            loop = "closed" if kind == "concurrency" else "open"
            steps = [result for result in group if result.kind == kind]
            points = sorted(filter(None, map(_load_point, steps)), key=lambda point: point.load)
            if points:
                marked = [_with_pareto(point, points) for point in points]
                bend = knee(points)
                level = int(bend) if bend is not None and loop == "closed" else None
                curves.append(Capacity(target_name, model_name, loop, steps[-1].build, marked, bend, level))
    return curves


def knee(points: list[CapacityPoint]) -> float | None:
    """Return the highest load that is below all overloaded loads.

    A load counts as overloaded if requests are rejected, or if the 95th percentile of TTFT is more than twice its value
    at the lowest load.

    Args:
        points: metrics at each load, lowest load first.

    Returns:
        The load, or None if it cannot be determined: with fewer than two points, or if the lowest load is overloaded or
        has no TTFT.
    """
    if len(points) < 2 or points[0].ttft_p95_s is None:
        return None
    limit = KNEE_FACTOR * points[0].ttft_p95_s
    load_at_knee: float | None = None
    for point in points:
        # The search ends at the first overloaded load. If a higher load does not look overloaded, the cause is chance.
        if point.reject_rate or point.ttft_p95_s is None or point.ttft_p95_s > limit:
            break
        load_at_knee = point.load
    return load_at_knee


def _with_pareto(point: CapacityPoint, points: list[CapacityPoint]) -> CapacityPoint:
    own = (point.decode_tps, point.output_tps)
    beaten = None in own or any(
        other.decode_tps is not None
        and other.output_tps is not None
        and other.decode_tps >= (own[0] or 0)
        and other.output_tps >= (own[1] or 0)
        and (other.decode_tps, other.output_tps) != own  # a point with equal rates does not beat this point
        for other in points
    )
    return replace(point, pareto=not beaten)


def _load_point(result: LatestResult) -> CapacityPoint | None:
    concurrency = next((row["concurrency"] for row in result.rows), None)
    rate = result.param("rate_rps") or result.median("rate_rps")
    load = concurrency if result.kind == "concurrency" else rate
    if load is None:
        return None
    issued = sum(result.values("requests"))
    return CapacityPoint(
        scenario=result.scenario,
        load=load,
        concurrency=concurrency,
        rate_rps=rate,
        decode_tps=result.median("output_tps_user"),
        output_tps=result.median("output_tps"),
        tpot_s=result.median("tpot_s"),
        ttft_s=result.median("ttft_s"),
        ttft_p95_s=result.median("ttft_p95_s"),
        queue_wait_ms=result.median_ms("queue_s"),
        goodput_rps=result.median("goodput_rps"),
        goodput_share=result.median("goodput_share"),
        reject_rate=sum(result.values("rejected")) / issued if issued else None,
        samples=len(result.rows),
        estimated=result.any("estimated"),
    )


CONTEXT_KINDS = ("single", "decode")


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
    """Return the rates by context length for each target, model and kind.

    Args:
        archive: the result database.
        target: name of the only target to return, or None for all.
        model: name of the only model to return, or None for all.
    """
    scalings: list[Scaling] = []
    results = [result for result in latest(archive, target=target, model=model, kinds=CONTEXT_KINDS) if result.rows]
    for target_name, model_name, group in by_group(results):
        ladders: dict[str, list[LatestResult]] = {}
        for result in group:
            ladders.setdefault(_ladder_kind(result), []).append(result)
        scalings += [_ladder(target_name, model_name, kind, steps) for kind, steps in ladders.items()]
    return scalings


def _ladder_kind(result: LatestResult) -> str:
    """Return which kind of scaling with the context length a result measures.

    The kinds are `cold` (no prefix cache hit), `warm` (prefix cache hit) and `decode` (decoding after a cached
    context).
    """
    name_parts = result.scenario.split(":")
    return "decode" if result.kind == "decode" else "warm" if "warm" in name_parts else "cold"


def _ladder(target: str, model: str, kind: str, steps: list[LatestResult]) -> Scaling:
    points = sorted(
        (_context_point(result) for result in steps),
        key=lambda point: point.prompt_tokens or point.prompt_size or 0,
    )
    rates = [point.decode_tps for point in points if point.decode_tps]
    flatness = rates[-1] / rates[0] if len(rates) > 1 else None
    return Scaling(target, model, kind, steps[-1].build, points, flatness)


def _context_point(result: LatestResult) -> ScalingPoint:
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
