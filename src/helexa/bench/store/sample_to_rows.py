"""Converts a sample into rows of the tables run and request.

The arrival times of a request's chunks are stored as bytes (`pack`): the gaps between the times in microseconds, as
little-endian uint32, compressed by zlib.
"""

import json
import statistics
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from itertools import accumulate
from typing import Any

import numpy as np

from helexa.bench.request_records_and_metrics import Distribution, RequestRecord, RunMeasures, measure
from helexa.bench.store.row_types import Reading, Sample

_LONGEST_US = 2**32 - 1


def pack(moments: Sequence[float]) -> bytes | None:
    """Encode the arrival times of a request's chunks for the column `chunks`.

    The times are ascending, in seconds since the request was sent. Return None if there are no times.
    """
    if not moments:
        return None
    microseconds = np.rint(np.asarray(moments, dtype=np.float64) * 1e6)
    gaps = np.clip(np.diff(microseconds, prepend=0.0), 0, _LONGEST_US)
    return zlib.compress(gaps.astype("<u4").tobytes())


def unpack(packed: bytes | None) -> tuple[float, ...]:
    """Decode times that `pack` has encoded, to seconds since the request was sent."""
    if packed is None:
        return ()
    gaps = np.frombuffer(zlib.decompress(packed), dtype="<u4")
    return tuple(total / 1e6 for total in accumulate(int(gap) for gap in gaps))


_MEDIANS = ("ttft_s", "ttfo_s", "tpot_s", "icl_s", "e2e_s", "output_tps_user", "prefill_tps", "queue_s")
_TOTALS = ("output_tps", "goodput_rps", "goodput_share")
_RECORDED = (
    *("role", "status", "http_status", "error", "finish_reason"),
    *("prefill_s", "decode_s", "prompt_tokens", "cached_tokens", "reasoning_tokens"),
)
_MEASURED = ("ttft_s", "ttfo_s", "tpot_s", "e2e_s", "queue_s", "completion_tokens")


def columns_of(sample: Sample) -> dict[str, Any]:
    """Return the columns of the table `run` that are computed from a sample.

    Values in `sample.columns` replace computed values of the same name.
    """
    return {
        **_summary(sample.measures),
        **_tokens(sample.records),
        **_highest(sample.readings),
        **sample.columns,
        "metrics": json.dumps(_metrics(sample)),
    }


def request_rows(run_id: int, sample: Sample) -> Iterator[dict[str, Any]]:
    """Yield a row of the table `request` for each request of a sample."""
    for number, record in enumerate(sample.records):
        measured = measure(record)
        yield {
            "run_id": run_id,
            "number": number,
            **{name: getattr(record, name) for name in _RECORDED},
            **{name: getattr(measured, name) for name in _MEASURED},
            **{f"{name}_s": getattr(record, name) - sample.start for name in ("scheduled", "sent", "ended")},
            "estimated": int(measured.estimated),
            "chunks": pack([delta.at - record.sent for delta in record.deltas]),
        }


def _summary(measures: RunMeasures | None) -> dict[str, Any]:
    if measures is None:
        return {}
    counts = ("requests", "completed", "rejected", "timed_out", "failed", "incomplete")
    measured = measures.distributions
    return {
        **{name: getattr(measures, name) for name in counts},
        **{name: measured[name].p50 for name in _MEDIANS if name in measured},
        **{f"{name}_p95_s": measured[f"{name}_s"].p95 for name in ("ttft", "e2e") if f"{name}_s" in measured},
        **{name: measures.totals[name] for name in _TOTALS if name in measures.totals},
        "estimated": int(measures.estimated),
    }


def _measured(records: list[RequestRecord]) -> list[RequestRecord]:
    """Return the requests from which token counts are computed."""
    # If the sample has probes, only the probes are returned, because all other requests are background load.
    return [record for record in records if record.role == "probe"] or records


def _tokens(records: list[RequestRecord]) -> dict[str, float | None]:
    names = ("prompt_tokens", "cached_tokens", "completion_tokens", "prefill_s", "decode_s")
    done = [record for record in _measured(records) if record.status == "ok"]
    return {name: _median(v for r in done if (v := getattr(r, name)) is not None) for name in names}


def _median(values: Iterable[float]) -> float | None:
    known = list(values)
    return float(statistics.median(known)) if known else None


def _highest(readings: list[Reading]) -> dict[str, float | None]:
    """Return the highest value of each telemetry column during a sample.

    With several devices, the memory of all devices at the same time is added up. Utilization and temperature are those
    of the device with the highest value.
    """
    moments: dict[float, list[Reading]] = {}
    for reading in readings:
        moments.setdefault(reading.at_s, []).append(reading)

    def most(name: str, over: Callable[[list[Any]], float]) -> float | None:
        known = ([v for reading in group if (v := getattr(reading, name)) is not None] for group in moments.values())
        return max((over(values) for values in known if values), default=None)

    return {
        "vram_used_mb": most("vram_used_mb", sum),
        "gpu_util_pct": most("utilization_pct", max),
        "gpu_temp_c": most("temp_c", max),
    }


def _metrics(sample: Sample) -> dict[str, Any]:
    measured: dict[str, Any] = dict(sample.extra)
    if sample.measures is not None:
        measured["distributions"] = {name: _rounded(d) for name, d in sample.measures.distributions.items()}
        measured["totals"] = sample.measures.totals
        measured["prefill_estimated"] = sample.measures.prefill_estimated
    return measured


def _rounded(distribution: Distribution) -> dict[str, Any]:
    return {name: value for name, value in asdict(distribution).items() if value is not None}
