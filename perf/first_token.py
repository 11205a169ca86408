"""Measure the time and the CPU time of the command `helexa generate "hi"` from process start to the first token.

usage: python perf/first_token.py [MODEL] [--runs 5] [--url URL]

Without `--url`, each run of the command starts an engine process for itself. A first warm-up run is not counted, so
that files and kernels are cached. With `--url`, the command uses this server, which should have the model loaded.

The JSON output has the time to the first token of each run and the median (`first_token_s`), the CPU time of all
processes of a run (`cpu_s`), and the threshold for the median.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from statistics import median

PRIVATE_THRESHOLD, SERVER_THRESHOLD = 1.5, 0.5


def run(command: list[str], environ: dict[str, str]) -> tuple[float, float]:
    """Run the command line `command` until it prints its first token.

    Returns:
        The seconds to the first token, and the CPU seconds of all processes of the command.
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
    environ = dict(os.environ)
    environ.pop("PYTHONDONTWRITEBYTECODE", None)  # later runs load compiled modules, as after an installation with pip
    runs = [run(command, environ) for _ in range(arguments.runs + 1)][1:]
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
