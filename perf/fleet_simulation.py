"""Simulate a fleet of five nodes to compare two policies that load and evict models, as JSON lines.

usage: python perf/fleet_simulation.py [--seeds 3] [--minutes 60] [--per-minute 9] [--models 12]

The simulation uses a virtual clock and is deterministic for a given seed. Agents have conversations with `--models`
models, which the conversations choose by Zipf's law. Each request of a conversation repeats all earlier messages, so
its prefill is cheap if the node still has the conversation in its prefix cache. The memory of all nodes together holds
about half of the models. The two policies are:

    ours        the functions that the gateway uses
    lru_fifo    loads models in the order of requests, in place of the least recently used models, and routes a request
                to the least busy node

The script prints one line per seed and policy with these keys:

    swaps                   number of models that were unloaded for other models
    ttft_p50, ttft_p99      median and 99th percentile of the time to the first token, in seconds
    longest_wait            longest time that a request waited until its model was loaded, in seconds
    cached                  share of prompt tokens that were found in a prefix cache

The verdicts compare `ours` with `lru_fifo` over all seeds: at most half as many swaps, a lower 99th percentile of the
time to the first token, and no wait longer than the gateway's limit.
"""

import argparse
import json
import math
from dataclasses import dataclass

from support.fleet_policies import HelexaPolicy, LruFifo
from support.fleet_traffic import conversations, models
from support.fleet_world import NODES_MB, Outcome, World

from helexa.cortex.config import GatewaySection

SWAPS_THRESHOLD = 0.5
LONGEST_WAIT_SECS = GatewaySection().load_wait_secs


@dataclass(frozen=True)
class Comparison:
    """The results of both policies (see the module) on the same simulated traffic."""

    ours: Outcome
    usual: Outcome


def compare(seed: int, minutes: float, per_minute: float, count: int) -> Comparison:
    """Simulate both policies on the random traffic of the seed `seed`, and return their results.

    Args:
        seed: seed of the random conversations.
        minutes: simulated time in which conversations begin.
        per_minute: average number of conversations that begin per minute.
        count: number of models.
    """
    catalog = models(count)
    traffic = conversations(seed, catalog, 60 * minutes, per_minute)
    ours = World(catalog, HelexaPolicy(seed), traffic, NODES_MB).run()
    return Comparison(ours, World(catalog, LruFifo(seed), traffic, NODES_MB).run())


def percentile(values: list[float], share: float) -> float:
    """Return the quantile of `values` at `share`, a number from 0 to 1."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def row(seed: int, policy: str, outcome: Outcome) -> dict[str, object]:
    """Return the output line of one policy for one seed."""
    return {
        "seed": seed,
        "policy": policy,
        "requests": len(outcome.ttfts),
        "loads": outcome.loads,
        "swaps": outcome.evictions,
        "ttft_p50": round(percentile(outcome.ttfts, 0.5), 2),
        "ttft_p99": round(percentile(outcome.ttfts, 0.99), 1),
        "longest_wait": round(max(outcome.waits), 1),
        "cached": round(outcome.cached_tokens / outcome.prompt_tokens, 3),
    }


def verdicts(runs: list[Comparison]) -> list[dict[str, object]]:
    """Return the verdicts over all seeds. Each verdict has a value, its threshold, and whether the value meets it."""
    ours, usual = (sum(run.evictions for run in side) for side in zip(*((r.ours, r.usual) for r in runs), strict=True))
    p99 = percentile([ttft for run in runs for ttft in run.ours.ttfts], 0.99)
    usual_p99 = percentile([ttft for run in runs for ttft in run.usual.ttfts], 0.99)
    longest = max(wait for run in runs for wait in run.ours.waits)
    return [
        _verdict("swaps", ours / max(usual, 1), f"<= {SWAPS_THRESHOLD} of lru_fifo", ours <= SWAPS_THRESHOLD * usual),
        _verdict("ttft_p99", p99, f"< {usual_p99:.1f} of lru_fifo", p99 < usual_p99),
        _verdict("longest_wait", longest, f"< {LONGEST_WAIT_SECS:g}", longest < LONGEST_WAIT_SECS),
    ]


def _verdict(name: str, value: float, threshold: str, holds: bool) -> dict[str, object]:
    return {"verdict": name, "value": round(value, 2), "threshold": threshold, "holds": holds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--per-minute", type=float, default=9)
    parser.add_argument("--models", type=int, default=12)
    args = parser.parse_args()
    runs: list[Comparison] = []
    for seed in range(1, args.seeds + 1):
        runs.append(compare(seed, args.minutes, args.per_minute, args.models))
        print(json.dumps(row(seed, "ours", runs[-1].ours)), flush=True)
        print(json.dumps(row(seed, "lru_fifo", runs[-1].usual)), flush=True)
    for line in verdicts(runs):
        print(json.dumps(line))


if __name__ == "__main__":
    main()
