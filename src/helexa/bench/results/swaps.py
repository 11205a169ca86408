"""Durations of unloading and loading models."""

from dataclasses import dataclass

from helexa.bench.results.archive import Archive
from helexa.bench.results.latest import latest


@dataclass(frozen=True, slots=True)
class Swap:
    """Durations of loading one model at the newest build, as medians over samples."""

    target: str
    model: str
    scenario: str
    build: str
    quant: str
    unload_ms_median: float | None
    load_ms_median: float | None
    load_ms_p95: float | None
    cold_ttft_s_median: float | None
    cold_total_s_median: float | None
    vram_used_mb_median: float | None
    samples: int


def swaps(archive: Archive, *, target: str | None = None, model: str | None = None) -> list[Swap]:
    """Return the durations for each target, model and scenario. Only scenarios that load models are included."""
    swap_rows: list[Swap] = []
    for result in latest(archive, target=target, model=model):
        load = result.distribution("load_s")
        if load is None:
            continue
        swap_rows.append(
            Swap(
                target=result.target,
                model=result.model,
                scenario=result.scenario,
                build=result.build,
                quant=str(archive.tables.models[result.configuration.model_id].config.get("quant") or ""),
                unload_ms_median=result.median_ms("unload_s"),
                load_ms_median=load.p50 * 1000,
                load_ms_p95=load.p95 * 1000,
                cold_ttft_s_median=result.median("ttft_s"),
                cold_total_s_median=result.median("e2e_s"),
                vram_used_mb_median=result.median("vram_used_mb"),
                samples=load.n,
            )
        )
    return swap_rows
