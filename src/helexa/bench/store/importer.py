"""Imports the table `runs` of the first version of helexa-bench.

Values that the old table lacks are stored as None or an empty text. The old table may have columns that this version
does not know. The values of these columns are stored as additional JSON data.
"""

import json
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast, get_args

from helexa.bench.host_build_and_model import (
    EXTERNAL,
    Build,
    Configuration,
    Gpu,
    Host,
    Model,
    ScenarioKey,
    Target,
    TargetKind,
    digest,
)
from helexa.bench.store.database import StoreError
from helexa.bench.store.row_types import Sample
from helexa.bench.store.writer import Store

_KNOWN = (
    *("id", "ts", "target_name", "target_kind", "endpoint", "hostname", "driver_version", "cuda_version", "gpus_json"),
    *("git_sha", "git_sha_long", "package_version", "git_dirty", "build_timestamp", "rustc_version", "profile"),
    *("features_json", "candle_version", "bench_version", "bench_sha", "model_id", "harness", "capabilities_json"),
    *(
        "devices_json",
        "scenario_id",
        "prompt_size_approx",
        "prompt_tokens_actual",
        "max_tokens",
        "ttft_s",
        "decode_tps",
    ),
    *("total_s", "completion_tokens", "prefill_ms", "decode_ms", "prefill_tokens", "vram_used_mb", "gpu_util_pct"),
    *("gpu_temp_c", "concurrency", "ttft_p95_s", "queue_wait_ms", "rejected", "swap_unload_ms", "swap_load_ms"),
    *("artifact", "quality_score", "scorer", "image_units", "ok", "error"),
)
_NEEDED = ("id", "ts", "target_name", "git_sha", "model_id", "scenario_id", "ok")
_BUILD_FACTS = ("rustc_version", "profile", "candle_version")
_KINDS = {"chat": "single", "concurrency": "concurrency", "image": "image", "capability": "capability", "swap": "swap"}
_ROWS_AT_ONCE = 500


@dataclass(slots=True)
class ImportReport:
    """How many rows were newly imported, had been imported before, or are unreadable."""

    added: int = 0
    known: int = 0
    unreadable: int = 0


def import_runs(store: Store, path: Path) -> ImportReport:
    """Import the new rows of the database at `path`, and return the counts of rows.

    Raises:
        StoreError: the file cannot be read, or is not a database of the first helexa-bench.
    """
    report = ImportReport()
    # One transaction: if a part of the file cannot be read, nothing is imported, and the import can be repeated.
    with store.transaction():
        for row in _rows(path):
            key = f"runs:{digest([row[name] for name in _NEEDED])}"
            try:
                added = store.import_sample(_configuration(row), _sample(row), key, _score(row))
            except (KeyError, TypeError, ValueError, sqlite3.IntegrityError):
                report.unreadable += 1
            else:
                report.added += added
                report.known += not added
    return report


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as connection:
            connection.row_factory = sqlite3.Row
            columns = {row["name"] for row in connection.execute("PRAGMA table_info(runs)")}
            if missing := set(_NEEDED) - columns:
                lacks = f"lacks the columns {', '.join(sorted(missing))}" if columns else "is not there"
                raise StoreError(
                    f"{path} is not a database of the first helexa-bench: its table 'runs' {lacks}; name another file"
                )
            cursor = connection.execute("SELECT * FROM runs ORDER BY id")
            while rows := cursor.fetchmany(_ROWS_AT_ONCE):
                # Older databases lack some columns, whose values become None. Newer databases have additional columns,
                # whose values go into `extra`.
                yield from (dict.fromkeys(_KNOWN) | dict(row) for row in rows)
    except sqlite3.Error as error:
        raise StoreError(f"cannot read {path}: {error}; name a database of helexa-bench") from error


def _configuration(row: Mapping[str, Any]) -> Configuration:
    kind = row["target_kind"] or "neuron"
    if kind not in get_args(TargetKind):
        raise ValueError(kind)
    return Configuration(
        Target(_required(row, "target_name"), cast(TargetKind, kind), row["endpoint"] or ""),
        Host(
            hostname=row["hostname"] or _required(row, "target_name"),
            driver_version=row["driver_version"] or "",
            cuda_version=row["cuda_version"] or "",
            gpus=tuple(_gpus(_json(row["gpus_json"]))),
        ),
        Build(
            engine="helexa" if kind == "neuron" else kind,
            sha=row["git_sha"] or EXTERNAL,
            sha_long=row["git_sha_long"] or "",
            version=row["package_version"] or "",
            dirty=None if row["git_dirty"] is None else bool(row["git_dirty"]),
            built_ms=None if not row["build_timestamp"] else _milliseconds(row["build_timestamp"]),
            facts={name: row[name] for name in _BUILD_FACTS if row[name]}
            | ({"features": features} if (features := _json(row["features_json"])) else {}),
        ),
        Model(_required(row, "model_id"), _present(harness=row["harness"], devices=_json(row["devices_json"]))),
        _scenario(row),
    )


def _scenario(row: Mapping[str, Any]) -> ScenarioKey:
    """Return the scenario of an old row.

    The first version sent the same prompt in all samples. The scenario has the parameter `prompts` to record this fact.
    """
    name = _required(row, "scenario_id")
    kind = _KINDS.get(name.partition(":")[0], "other")
    params = _present(prompt_tokens=row["prompt_size_approx"], max_tokens=row["max_tokens"])
    return ScenarioKey(name, kind, params | {"prompts": "identical"})


def _sample(row: Mapping[str, Any]) -> Sample:
    rate = _number(row["decode_tps"])
    unknown = {name: value for name, value in row.items() if name not in _KNOWN and value is not None}
    columns = {
        "requests": 1,
        "completed": int(bool(row["ok"])),
        "rejected": row["rejected"] or 0,
        "concurrency": row["concurrency"],
        "prompt_tokens": row["prompt_tokens_actual"],
        "completion_tokens": row["completion_tokens"],
        "ttft_s": row["ttft_s"],
        "ttft_p95_s": row["ttft_p95_s"],
        "tpot_s": 1 / rate if rate else None,
        "e2e_s": row["total_s"],
        "output_tps_user": rate,
        "prefill_tps": _rate(row["prefill_tokens"], row["prefill_ms"]),
        "prefill_s": _seconds(row["prefill_ms"]),
        "decode_s": _seconds(row["decode_ms"]),
        "queue_s": _seconds(row["queue_wait_ms"]),
        "unload_s": _seconds(row["swap_unload_ms"]),
        "load_s": _seconds(row["swap_load_ms"]),
        "vram_used_mb": row["vram_used_mb"],
        "gpu_util_pct": row["gpu_util_pct"],
        "gpu_temp_c": row["gpu_temp_c"],
    }
    metadata = _present(bench_version=row["bench_version"], bench_sha=row["bench_sha"], image_units=row["image_units"])
    return Sample(
        started_ms=_milliseconds(row["ts"]),
        start=0.0,
        duration_s=_number(row["total_s"]) or 0.0,
        seed=None,  # the first version had a fixed prompt
        ok=bool(row["ok"]),
        error=row["error"],
        artifact=row["artifact"],
        columns={name: value for name, value in columns.items() if value is not None},
        extra={"imported": metadata | unknown},
    )


def _score(row: Mapping[str, Any]) -> tuple[str, float] | None:
    score = _number(row["quality_score"])
    return None if score is None else (row["scorer"] or "manual", score)


def _required(row: Mapping[str, Any], name: str) -> str:
    value = row[name]
    if not isinstance(value, str) or not value:
        raise ValueError(name)
    return value


def _json(text: str | None) -> Any:
    try:
        return json.loads(text) if text else None
    except ValueError:
        return None


def _gpus(entries: Any) -> Iterator[Gpu]:
    for entry in entries if isinstance(entries, list) else []:
        if isinstance(entry, dict):
            yield Gpu(str(entry.get("name", "")), int(entry.get("vram_total_mb") or 0))
        else:
            yield Gpu(str(entry), 0)


def _milliseconds(moment: object) -> int:
    """Return a time as UTC epoch milliseconds.

    `moment` is an ISO 8601 text (UTC if it has no time zone), or a number of Unix seconds or milliseconds.
    """
    if isinstance(moment, (int, float)):
        return round(moment if moment > 1e11 else moment * 1000)
    moment_read = datetime.fromisoformat(str(moment).replace(" UTC", "+00:00"))
    return round((moment_read if moment_read.tzinfo else moment_read.replace(tzinfo=UTC)).timestamp() * 1000)


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) else None


def _seconds(milliseconds: object) -> float | None:
    number = _number(milliseconds)
    return None if number is None else number / 1000


def _rate(tokens: object, milliseconds: object) -> float | None:
    count, time = _number(tokens), _number(milliseconds)
    return count / time * 1000 if count and time else None


def _present(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
