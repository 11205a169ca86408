"""A realistic history of a small fleet: two years of builds in a database of a chosen size.

Speeds follow from the hardware, the model's size and the load. Speeds change at three builds (`GAINS`), and `beast` is
slower between two builds (`SLOWDOWN`).
"""

import hashlib
import json
import math
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from helexa.bench.host_build_and_model import Build, Gpu, Host, Model, ScenarioKey, Target
from helexa.bench.store.sample_to_rows import pack
from helexa.bench.store.writer import Store

GAINS = (0.2, 0.42, 0.9)
"""Positions in the history, from 0 to 1, of builds that made every target 7 % faster."""
DAY_MS = 86_400_000
START_MS = 1_735_689_600_000  # 2025-01-01
SLOWDOWN = 1.09
"""Factor on the times of `beast` between the build that causes a regression and the build that fixes it."""


@dataclass(frozen=True)
class Machine:
    target: Target
    host: Host
    decode: float  # tokens per second of a model of one billion parameters
    prefill: float


MACHINES = (
    Machine(
        Target("beast", "neuron", "http://beast:13131", "Beast"),
        Host("beast", "Linux", "6.19", "AMD Ryzen 9 9950X", 16, 196_608, "595.58", "13.0",
             (Gpu("NVIDIA GeForce RTX 5090", 32_607),) * 2),
        620, 42_000,
    ),
    Machine(
        Target("closet", "neuron", "http://closet:13131", "Closet server"),
        Host("closet", "Linux", "6.12", "Intel Xeon W-2295", 18, 131_072, "580.95", "12.9",
             (Gpu("NVIDIA GeForce RTX 3090", 24_576), Gpu("NVIDIA GeForce RTX 4060 Ti", 16_380))),
        330, 14_000,
    ),
    Machine(
        Target("gateway", "cortex", "http://gateway:8000", "Gateway"),
        Host("gateway", "Linux", "6.12", "AMD EPYC 4564P", 16, 65_536),
        300, 13_000,
    ),
)  # fmt: skip
MODELS = (("Qwen/Qwen3-0.6B", 0.6), ("Qwen/Qwen3-8B", 8.2), ("google/gemma-3-4b-it", 4.3), ("openai/gpt-oss-20b", 3.6))
SIZES = (128, 1024, 4096, 16384)
LEVELS = (1, 2, 4, 8, 16)
RATES = (0.5, 1.0, 2.0)


def scenarios() -> list[ScenarioKey]:
    single = [
        ScenarioKey(f"single:{kind}:{size}", "single", {"prompt_tokens": size, "cache": kind, "max_tokens": 256})
        for kind in ("cold", "warm")
        for size in SIZES
    ]
    closed = [ScenarioKey(f"concurrency:{k}", "concurrency", {"concurrency": k, "prompt_tokens": 512}) for k in LEVELS]
    opened = [ScenarioKey(f"rate:poisson:{r:g}", "rate", {"rate_rps": r, "prompt_tokens": 512}) for r in RATES]
    single_request = [
        ScenarioKey("swap", "swap", {}),
        ScenarioKey("tools", "correctness", {"cases": 8}),
        ScenarioKey("capability:clock", "capability", {"prompt": "Draw a clock"}),
    ]
    return single + closed + opened + single_request


def write(path: Path, runs: int = 50_000, seed: int = 1) -> None:
    """Fill a new database with about `runs` runs: five per configuration, over as many builds as that number needs."""
    rng = random.Random(seed)
    keys = scenarios()
    builds = max(2, round(runs / (len(MACHINES) * len(MODELS) * len(keys) * 5.05)))
    with Store(path) as store, store.transaction() as connection:
        ids = _Ids(connection)
        rows = list(_rows(rng, ids, keys, builds))
        names = list(rows[0])
        marks = ", ".join(f":{name}" for name in names)
        connection.executemany(f"INSERT INTO run ({', '.join(names)}) VALUES ({marks})", rows)
        _requests(connection, rng)


class _Ids:
    def __init__(self, connection: Any) -> None:
        self._connection = connection

    def __call__(self, table: str, **columns: Any) -> int:
        names = ", ".join(columns)
        marks = ", ".join("?" * len(columns))
        sql = f"INSERT INTO {table} ({names}) VALUES ({marks}) RETURNING id"
        return self._connection.execute(sql, list(columns.values())).fetchone()[0]


def build(number: int) -> Build:
    sha = hashlib.sha1(f"build {number}".encode()).hexdigest()
    version = f"0.{1 + number // 8}.{number % 8}"
    return Build("helexa", sha[:7], sha, version, False, START_MS + number * 6 * DAY_MS)


def _rows(rng: random.Random, ids: _Ids, keys: list[ScenarioKey], builds: int) -> Iterator[dict[str, Any]]:
    build_ids = [
        ids("build", engine=b.engine, sha=b.sha, fingerprint=b.fingerprint, sha_long=b.sha_long, version=b.version,
            dirty=0, built_ms=b.built_ms, first_seen_ms=b.built_ms)
        for b in map(build, range(builds))
    ]  # fmt: skip
    model_ids = [
        ids("model", name=name, config_hash=model.config_hash, config=json.dumps(model.config), first_seen_ms=START_MS)
        for name, _ in MODELS
        for model in [Model(name, {"quant": "q8_0", "harness": "torch", "context": 32768})]
    ]
    scenario_ids = [
        ids("scenario", name=key.name, params_hash=key.params_hash, kind=key.kind, params=json.dumps(key.params))
        for key in keys
    ]
    for machine in MACHINES:
        host = asdict(machine.host) | {"fingerprint": machine.host.fingerprint, "first_seen_ms": START_MS}
        host["gpus"] = json.dumps(host["gpus"])
        host_id, target_id = ids("host", **host), ids("target", **asdict(machine.target))
        for number in range(builds):
            at = START_MS + number * 6 * DAY_MS + rng.randrange(DAY_MS)
            slow = _slowdown(machine, number, builds)
            for model_id, (_, size) in zip(model_ids, MODELS, strict=True):
                for scenario_id, key in zip(scenario_ids, keys, strict=True):
                    for _ in range(5 + (rng.random() < 0.05)):
                        at += rng.randrange(2_000, 40_000)
                        yield {
                            "key": f"made:{at}:{rng.getrandbits(60)}",
                            "target_id": target_id,
                            "host_id": host_id,
                            "build_id": build_ids[number],
                            "model_id": model_id,
                            "scenario_id": scenario_id,
                            "started_ms": at,
                            "bench_version": "0.1.0",
                            **_sample(rng, machine, size, key, slow),
                        }


def _slowdown(machine: Machine, number: int, builds: int) -> float:
    gain = 0.93 ** sum(number / builds >= share for share in GAINS)
    broken = machine.target.name == "beast" and 0.55 <= number / builds < 0.8
    return gain * (SLOWDOWN if broken else 1)


_EMPTY: dict[str, Any] = dict.fromkeys(
    ("error", "artifact", "concurrency", "rate_rps", "ttft_s", "ttft_p95_s", "ttfo_s", "tpot_s", "icl_s", "e2e_s",
     "e2e_p95_s", "output_tps_user", "output_tps", "prefill_tps", "prefill_s", "decode_s", "queue_s", "goodput_rps",
     "goodput_share", "unload_s", "load_s", "score", "prompt_tokens", "cached_tokens", "completion_tokens",
     "vram_used_mb", "gpu_util_pct", "gpu_temp_c")
)  # fmt: skip


def _sample(rng: random.Random, machine: Machine, size: float, key: ScenarioKey, slow: float) -> dict[str, Any]:
    def near(value: float, spread: float = 0.015) -> float:
        return value * math.exp(rng.gauss(0, spread))

    level = float(key.params.get("concurrency", 0) or key.params.get("rate_rps", 0) * 4 or 1)
    prompt = int(key.params.get("prompt_tokens", 256))
    cached = prompt - 24 if key.params.get("cache") == "warm" else 0
    share = 1 / (1 + 0.07 * (level - 1) + max(0, level - 8) * 0.12)
    tpot = near(slow * size / machine.decode / share * (1 + prompt / 60_000))
    prefill = near(slow * (prompt - cached) * size / machine.prefill + 0.008)
    queue = near(0.002 + max(0, level - 8) * 0.06 * size / 4, 0.2)
    ttft = prefill * (1 + 0.12 * (level - 1)) + queue + 0.004
    tokens, count = 256, max(1, int(level * 4))
    e2e = ttft + tpot * (tokens - 1)
    rejected = int(level > 12 and count * 0.04)
    columns = _EMPTY | {
        "duration_s": e2e,
        "seed": rng.getrandbits(31),
        "ok": 1,
        "estimated": int(machine.target.kind == "cortex" and key.kind == "single"),
        "requests": count,
        "completed": count - rejected,
        "rejected": rejected,
        "prompt_tokens": prompt,
        "cached_tokens": cached,
        "completion_tokens": tokens,
        "ttft_s": ttft,
        "ttft_p95_s": ttft * near(1.2 + 0.04 * level),
        "ttfo_s": ttft * 1.01,
        "tpot_s": tpot,
        "icl_s": tpot,
        "e2e_s": e2e,
        "e2e_p95_s": e2e * near(1.1),
        "output_tps_user": 1 / tpot,
        "output_tps": level * tokens / e2e,
        "prefill_tps": (prompt - cached) / prefill,
        "prefill_s": prefill,
        "decode_s": tpot * tokens,
        "queue_s": queue,
        "metrics": "{}",
    }
    if machine.host.gpus:
        columns |= {
            "vram_used_mb": int(size * 1100 + 4000 + prompt * 0.1),
            "gpu_util_pct": min(99.0, near(60 + 3 * level)),
            "gpu_temp_c": near(62),
        }
    if key.kind == "concurrency":
        columns |= {"concurrency": int(level), "goodput_rps": level / e2e * 0.98, "goodput_share": 1 - rejected / count}
    elif key.kind == "rate":
        share = min(1.0, near(0.99 - max(0, level - 6) * 0.1))
        columns |= {"rate_rps": level / 4, "goodput_rps": level / 4 * share, "goodput_share": share}
    elif key.kind == "swap":
        columns |= {"load_s": near(size * 1.6 + 2), "unload_s": near(0.6), "duration_s": size * 2 + 3}
    elif key.kind == "correctness":
        columns |= {"score": min(1.0, round(near(0.9, 0.05) * 10) / 10)}
    elif key.kind == "capability":
        columns |= {"artifact": "def clock(hour, minute):\n    return f'{hour:02}:{minute:02}'\n", "score": 0.75}
    if rng.random() < 0.004:
        columns |= dict.fromkeys((n for n in _EMPTY if n.endswith(("_s", "tps", "tps_user"))), None)
        columns |= {"ok": 0, "error": "503: every slot is taken", "completed": 0, "failed": 1}
        return columns
    return columns | {"failed": 0}


def _requests(connection: Any, rng: random.Random) -> None:
    """Add the requests of the 60 newest runs with more than one concurrent request."""
    newest = connection.execute(
        "SELECT run.id, concurrency, requests, ttft_s, tpot_s FROM run WHERE concurrency > 1 AND ok"
        " ORDER BY started_ms DESC LIMIT 60"
    ).fetchall()
    for run in newest:
        free = [0.0] * run["concurrency"]
        for number in range(run["requests"]):
            user = min(range(len(free)), key=free.__getitem__)
            sent, ttft = free[user], run["ttft_s"] * math.exp(rng.gauss(0, 0.1))
            moments = [ttft + i * run["tpot_s"] * math.exp(rng.gauss(0, 0.02)) for i in range(256)]
            bad = rng.random() < 0.02
            free[user] = sent + (0.02 if bad else max(moments))
            columns: dict[str, Any] = {
                "run_id": run["id"], "number": number, "role": "load", "status": "rejected" if bad else "ok",
                "http_status": 503 if bad else 200, "scheduled_s": sent, "sent_s": sent, "ended_s": free[user],
            }  # fmt: skip
            if not bad:
                columns |= {
                    "ttft_s": ttft, "ttfo_s": ttft, "tpot_s": run["tpot_s"], "e2e_s": max(moments),
                    "prompt_tokens": 512, "completion_tokens": 256, "prefill_s": ttft * 0.9, "queue_s": ttft * 0.1,
                    "chunks": pack(sorted(moments)), "finish_reason": "length",
                }  # fmt: skip
            names = ", ".join(columns)
            connection.execute(
                f"INSERT INTO request ({names}) VALUES ({', '.join('?' * len(columns))})", list(columns.values())
            )


def add_alert(path: Path) -> None:
    """Add one confirmed and one dismissed alert about the newest configurations of `beast`."""
    with Store(path) as store:
        with store.transaction() as connection:
            configurations = connection.execute(
                "SELECT target_id, host_id, build_id, model_id, scenario_id, started_ms FROM run"
                " WHERE target_id = (SELECT id FROM target WHERE name = 'beast') AND ok GROUP BY scenario_id"
                " ORDER BY started_ms DESC LIMIT 2"
            ).fetchall()
        for configuration, state in zip(configurations, ("confirmed", "dismissed"), strict=True):
            columns = {name: configuration[name] for name in configuration.keys() if name != "started_ms"}  # noqa: SIM118
            numbers = {"ratio": 1.09, "ratio_low": 1.05, "ratio_high": 1.12, "threshold": 0.03, "samples": 8}
            moments = {
                "raised_ms": configuration["started_ms"],
                "updated_ms": configuration["started_ms"],
                "delivered_ms": None,
            }
            labels = {"metric": "tpot_s", "state": state, "verdict": "regressed"}
            store.put_alert(
                columns
                | numbers
                | moments
                | labels
                | {"baseline_samples": 25, "baseline_builds": [configuration["build_id"]]}
            )


def run_with_requests(path: Path) -> int:
    """Return the id of the last run that has stored requests."""
    with Store(path) as store, store.transaction() as connection:
        return connection.execute("SELECT max(run_id) FROM request").fetchone()[0]
