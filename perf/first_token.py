"""Measure the time and CPU time of `helexa generate "hi"` from process start to the first token.

usage: python perf/first_token.py [MODEL] [--runs 5] [--url URL]

Without `--url`, each run starts a private engine. A first warm-up run is not counted, so files and kernels are cached.
With `--url`, the script uses this server, which should have the model loaded.

The JSON output has `first_token_s` of each run and the median, `cpu_s` of all processes of a run, and the threshold.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from statistics import median

PRIVATE_THRESHOLD, SERVER_THRESHOLD = 3.0, 0.5


def run(command: list[str], environ: dict[str, str]) -> tuple[float, float]:
    """Run the command until its first token.

    Return the seconds to the first token, and the CPU seconds of all processes.
    """
    usage_before = resource.getrusage(resource.RUSAGE_CHILDREN)
    begin = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, env=environ) as process:
        assert process.stdout is not None
        first = os.read(process.stdout.fileno(), 1)
        seconds = time.perf_counter() - begin
        process.stdout.read()
    if process.returncode or not first:
        raise SystemExit(f"helexa generate ended with {process.returncode}")
    usage_after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return seconds, usage_after.ru_utime + usage_after.ru_stime - usage_before.ru_utime - usage_before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="helexa/small")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--url")
    arguments = parser.parse_args()
    target = ["--url", arguments.url] if arguments.url else ["--private"]
    command = [
        sys.executable,
        "-m",
        "helexa",
        "generate",
        "hi",
        "--model",
        arguments.model,
        "--max-tokens",
        "8",
        "--quiet",
        *target,
    ]
    runs = [run(command, dict(os.environ)) for _ in range(arguments.runs + 1)][1:]
    threshold = SERVER_THRESHOLD if arguments.url else PRIVATE_THRESHOLD
    seconds = [round(first, 3) for first, _ in runs]
    middle = median(seconds)
    spent = [round(cpu, 2) for _, cpu in runs]
    print(
        json.dumps(
            {
                "first_token_s": seconds,
                "median": middle,
                "cpu_s": spent,
                "threshold": threshold,
                "held": middle <= threshold,
            }
        )
    )


if __name__ == "__main__":
    main()
