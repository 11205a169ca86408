"""Measure how often helexa-bench's comparison of builds raises false alarms, and how often it detects slowdowns.

usage: python perf/verdicts.py measure http://127.0.0.1:13131 helexa/small --samples 300 --out samples.json
       python perf/verdicts.py replay samples.json

`measure` takes samples of a real server. `replay` draws from these samples at random to simulate builds: unchanged
builds, and builds that are 8 % slower.
"""

import argparse
import asyncio
import json
import statistics
import time
from pathlib import Path

import numpy as np

from helexa.bench.client import Client, open_session
from helexa.bench.host_build_and_model import Model
from helexa.bench.prompts_and_load_generators import Clock, sample_seed
from helexa.bench.request_records_and_metrics import measure
from helexa.bench.scenarios.scenario import Subject
from helexa.bench.scenarios.single import Single
from helexa.bench.servers import ServedModel
from helexa.bench.verdicts_and_change_points import confirms, judge
from helexa.bench.wire_formats import api_format_of

FIRST, EXTRA, BUILDS, TRIALS = 5, 3, 200, 200
PROMPT_TOKENS, ANSWER_TOKENS = 128, 256  # defaults of helexa-bench


async def take_samples(endpoint: str, model: str, samples: int) -> dict[str, list[float]]:
    """Measure a server with `samples` single requests without prefix cache hits. Return the values of each metric."""
    scenario = Single(PROMPT_TOKENS, ANSWER_TOKENS, "cold")
    served = ServedModel(Model(name=model))
    samples_by_metric: dict[str, list[float]] = {"ttft_s": [], "tpot_s": []}
    async with open_session() as session:
        client = Client(session, endpoint, api_format_of("openai"), Clock(), ignore_eos=True)
        for number in range(samples + 3):
            subject = Subject(client, served, Clock(), salt=f"{time.time_ns()}")
            outcome = await scenario.run(subject, sample_seed(0, scenario.key.name, number))
            if number >= 3 and outcome.error is None:
                measured = measure(outcome.records[0])
                assert measured.ttft_s and measured.tpot_s
                samples_by_metric["ttft_s"].append(round(measured.ttft_s, 6))
                samples_by_metric["tpot_s"].append(round(measured.tpot_s, 7))
    return samples_by_metric


def alarms(samples: np.ndarray, rng: np.random.Generator) -> tuple[int, int]:
    """Simulate unchanged builds from `samples`, and count the builds that helexa-bench reports as changed.

    Returns:
        The number of builds that are suspected after the first samples, and how many of them are confirmed by
        additional samples (false alarms).
    """
    history: list[list[float]] = []
    suspected = confirmed = 0
    for _ in range(BUILDS):
        drawn = rng.choice(samples, FIRST + EXTRA).tolist()
        if judge(history, drawn[:FIRST], "lower").state in ("regressed", "improved"):
            suspected += 1
            confirmed += confirms(judge(history, drawn, "lower"), drawn[:FIRST], drawn[FIRST:])
        history.append(drawn[:FIRST])
    return suspected, confirmed


def detections(samples: np.ndarray, rng: np.random.Generator, slowdown: float) -> float:
    """Simulate slower builds, and return the share that helexa-bench reports as slower within eight samples.

    Args:
        samples: values of one metric, from which all samples of builds are drawn.
        rng: random generator.
        slowdown: factor on the values of a slower build, for example 1.08. Each slower build follows eight unchanged
            builds.
    """
    detected = 0
    for _ in range(TRIALS):
        history = [rng.choice(samples, FIRST).tolist() for _ in range(8)]
        drawn = (rng.choice(samples, FIRST + EXTRA) * slowdown).tolist()
        detected += judge(history, drawn[:FIRST], "lower").state == "regressed" and confirms(
            judge(history, drawn, "lower"), drawn[:FIRST], drawn[FIRST:]
        )
    return detected / TRIALS


def replay(path: Path) -> None:
    """Simulate builds from the samples in the file `path`, and print false alarms and detected slowdowns."""
    rows = []
    for name, values in json.loads(path.read_text())["metrics"].items():
        samples = np.array(values)
        counts = [alarms(samples, np.random.default_rng(seed)) for seed in range(5)]
        rows.append(
            {
                "metric": name,
                "samples": len(samples),
                "deviation": f"{statistics.stdev(values) / statistics.mean(values):.1%}",
                "alarms in 200": ", ".join(f"{confirmed} of {suspected}" for suspected, confirmed in counts),
                "8 % seen": f"{detections(samples, np.random.default_rng(0), 1.08):.0%}",
            }
        )
    for row in rows:
        print("  ".join(f"{key}: {value}" for key, value in row.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(required=True, dest="verb")
    measuring = verbs.add_parser("measure")
    measuring.add_argument("endpoint")
    measuring.add_argument("model")
    measuring.add_argument("--samples", type=int, default=300)
    measuring.add_argument("--out", type=Path, required=True)
    replaying = verbs.add_parser("replay")
    replaying.add_argument("samples", type=Path)
    arguments = parser.parse_args()
    if arguments.verb == "replay":
        replay(arguments.samples)
        return
    metrics = asyncio.run(take_samples(arguments.endpoint, arguments.model, arguments.samples))
    document = {"model": arguments.model, "taken": time.strftime("%Y-%m-%d", time.gmtime()), "metrics": metrics}
    arguments.out.write_text(json.dumps(document, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
