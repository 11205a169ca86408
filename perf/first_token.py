"""How long `helexa generate "hi"` takes from the start of its process to its first token, and what that costs.

usage: python perf/first_token.py [MODEL] [--runs 5] [--url URL]

Without `--url` it starts a private engine each time; its files and kernels are in the cache, since a run before the
first is not counted. With one it asks that server, which should have the model loaded.

JSON: `first_token_s` of each run and their median, `cpu_s` of all the processes of a run, and the bar.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from statistics import median

PRIVATE_BAR, SERVER_BAR = 3.0, 0.5


def run(command: list[str], environ: dict[str, str]) -> tuple[float, float]:
    """Seconds to the first token, and of processor time in all."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    begin = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, env=environ) as process:
        assert process.stdout is not None
        first = os.read(process.stdout.fileno(), 1)
        seconds = time.perf_counter() - begin
        process.stdout.read()
    if process.returncode or not first:
        raise SystemExit(f"helexa generate ended with {process.returncode}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="helexa/small")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--url")
    asked = parser.parse_args()
    target = ["--url", asked.url] if asked.url else ["--private"]
    command = [
        sys.executable,
        "-m",
        "helexa",
        "generate",
        "hi",
        "--model",
        asked.model,
        "--max-tokens",
        "8",
        "--quiet",
        *target,
    ]
    runs = [run(command, dict(os.environ)) for _ in range(asked.runs + 1)][1:]
    bar = SERVER_BAR if asked.url else PRIVATE_BAR
    seconds = [round(first, 3) for first, _ in runs]
    middle = median(seconds)
    spent = [round(cpu, 2) for _, cpu in runs]
    print(json.dumps({"first_token_s": seconds, "median": middle, "cpu_s": spent, "bar": bar, "held": middle <= bar}))


if __name__ == "__main__":
    main()
