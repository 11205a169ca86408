"""Run `helexa generate` many times beside busy processes, and count the runs that hang or fail.

usage: python perf/oversubscription.py [MODEL] [--runs 300] [--busy 8] [--tokens 64] [--limit 600] [--stop]

Each run starts its own engine, asks for the same greedy answer, and ends. The busy processes compute without a pause
during all runs. The script prints a JSON line for each run that is not answered. After the last run, or after Ctrl-C,
it prints a JSON line with these keys:

    runs, busy          number of runs, and of busy processes
    answered            runs with a complete answer
    failed              runs that ended with an error
    hung                runs whose engine the watchdog killed, or that did not end within `--limit` seconds
    different           answered runs whose answer differs from the first answer
    seconds             median, 95th percentile and maximum of the duration of the answered runs

The exit status is 1 unless all runs are answered with the same text. With `--stop`, the script ends at the first run
that is not answered.
"""

import argparse
import os
import subprocess
import sys
import time
from collections import Counter
from contextlib import ExitStack, suppress
from statistics import median, quantiles
from typing import Literal

from support.local_model import local_path
from support.output import print_line

PROMPT = "Write a short story about a lighthouse."
WATCHDOG = "made no progress"  # in the error of a request whose engine the watchdog killed
SHOWN = 2000  # characters of standard error

Outcome = Literal["answered", "failed", "hung"]


def generate(command: list[str], environ: dict[str, str], limit: float) -> tuple[Outcome, str, str]:
    """Run the command. Return the outcome, the answer, and the end of standard error."""
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ
    ) as process:
        try:
            answer, errors = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            process.kill()  # the engine ends with this process
            answer, errors = process.communicate()
            return "hung", answer, errors[-SHOWN:]
    if process.returncode == 0 and answer.strip():
        return "answered", answer, errors[-SHOWN:]
    return "hung" if WATCHDOG in errors else "failed", answer, errors[-SHOWN:]


def be_busy(count: int, stack: ExitStack) -> None:
    """Start `count` processes that compute without a pause, until `stack` closes."""
    for _ in range(count):
        process = stack.enter_context(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
        stack.callback(process.kill)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="helexa/small")
    parser.add_argument("--runs", type=int, default=300)
    parser.add_argument("--busy", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--limit", type=float, default=600.0)
    parser.add_argument("--stop", action="store_true")
    arguments = parser.parse_args()
    model = str(local_path(arguments.model))
    command = [
        *(sys.executable, "-m", "helexa", "generate", PROMPT, "--model", model, "--private"),
        *("--max-tokens", str(arguments.tokens), "--temperature", "0", "--no-stream"),
    ]
    environ = dict(os.environ)
    environ.pop("PYTHONDONTWRITEBYTECODE", None)  # later runs load compiled modules, as after an installation with pip
    outcomes: Counter[Outcome] = Counter()
    seconds: list[float] = []
    first, different = None, 0
    with suppress(KeyboardInterrupt), ExitStack() as stack:
        be_busy(arguments.busy, stack)
        for run in range(1, arguments.runs + 1):
            begin = time.perf_counter()
            outcome, answer, errors = generate(command, environ, arguments.limit)
            outcomes[outcome] += 1
            if outcome == "answered":
                seconds.append(time.perf_counter() - begin)
                first = first or answer
                different += answer != first
                print(f"run {run}: {seconds[-1]:.1f} s", file=sys.stderr)
                continue
            print_line(run=run, outcome=outcome, seconds=time.perf_counter() - begin, stderr=errors)
            if arguments.stop:
                break
    durations = {"median": median(seconds), "max": max(seconds)} if seconds else {}
    if len(seconds) > 1:
        durations["p95"] = quantiles(seconds, n=20, method="inclusive")[-1]
    counts = {name: outcomes[name] for name in ("answered", "failed", "hung")}
    durations = {name: round(value, 2) for name, value in durations.items()}
    print_line(runs=outcomes.total(), busy=arguments.busy, **counts, different=different, seconds=durations)
    if outcomes["answered"] < arguments.runs or different:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
