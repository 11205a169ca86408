"""Compare the speed of helexa's engine with other engines (peers) on the same GGUF file.

usage: python perf/compare.py MODEL [--rows decode@1,decode@1:7700,sampled@4,prefill@512] [--turns 5] [--threads 2]
           [--peer llama.cpp=PYTHON] [--peer ik_llama.cpp=PYTHON] [--peer openvino=PYTHON] [--install-peers DIR]
           [--engine "helexa NAME=COMMAND"] [--out snapshot.json]

A row is one measurement: `decode@B` or `decode@B:C` (B sequences decode together, with C tokens of context each),
`sampled@B` (the same with temperature 0.8, top_p 0.9 and top_k 40), or `prefill@N` (one prompt of N tokens). In every
turn, each engine measures all rows once in a new process. The engines run one after the other (helexa, llama.cpp,
openvino, helexa, ...), so that other activity on the machine affects all of them.

PYTHON is a Python interpreter with the peer's package (llama-cpp-python, ik-llama-cpp-python or openvino-genai).
`--install-peers` creates virtual environments with these packages below DIR if they are missing. It then compiles
llama.cpp and ik_llama.cpp for the machine, which takes many minutes and needs a C++ compiler, CMake and binutils.

`--engine` measures another version or setting of helexa beside the others. COMMAND starts `engine.py`, for example
"helexa 16-bit cache=python perf/engine.py --kv-dtype unquantized".

The script writes a table of medians and ratios to stdout, its progress to stderr, and all values to the file `--out`. A
star in the table marks a result whose largest and smallest values differ by more than 15 % of the median: measure it
again. A table entry is empty if a peer does not support the row or cannot load the model.
"""

import argparse
import json
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from support.comparison import OURS, Comparison
from support.local_model import local_path
from support.machine import commit, machine, versions
from support.peers import PEERS
from support.rows import ROWS, parse_rows

from helexa.core.errors import HelexaError

TURN_SECONDS = 3600.0
FOLDER = Path(__file__).parent


def run_engine(command: list[str]) -> tuple[list[dict[str, Any]], str | None]:
    """Run the command line of the script that measures an engine.

    Returns:
        The script's output lines, one per row, and why the script failed, or None if it succeeded.
    """
    try:
        completed = subprocess.run(
            command, check=False, capture_output=True, text=True, errors="replace", timeout=TURN_SECONDS
        )
    except subprocess.TimeoutExpired:
        return [], f"it took longer than {TURN_SECONDS:.0f} s"
    lines = [json.loads(line) for line in completed.stdout.splitlines() if line.startswith('{"engine"')]
    error_lines = [line for line in completed.stderr.splitlines() if line.strip()]
    return lines, (
        error_lines[-1] if error_lines else f"exit code {completed.returncode}"
    ) if completed.returncode else None


def compare(commands: dict[str, list[str]], turns: int) -> tuple[Comparison, dict[str, str]]:
    """Measure all engines, one after the other, `turns` times. A peer that fails is skipped in the following turns.

    Args:
        commands: command line of the script that measures an engine, by name of the engine.
        turns: number of measurements of each engine.

    Returns:
        The measurements, and the error messages of failed peers by name.
    """
    comparison, failures = Comparison(), dict[str, str]()
    for turn in range(1, turns + 1):
        for engine, command in commands.items():
            if engine in failures:
                continue
            begin = time.perf_counter()
            lines, failure = run_engine(command)
            for line in lines:
                comparison.add(line | {"engine": engine})
            print(f"turn {turn} of {turns}: {engine}, {time.perf_counter() - begin:.0f} s", file=sys.stderr, flush=True)
            if failure is None:
                continue
            if engine == OURS:
                raise SystemExit(f"{engine} failed: {failure}")
            print(f"{engine} failed: {failure}", file=sys.stderr, flush=True)
            failures[engine] = failure
    return comparison, failures


def row_names(text: str) -> str:
    """Return the value of the option `--rows`, which the engines' scripts parse again."""
    parse_rows(text)
    return text


def peer_argument(text: str) -> tuple[str, str]:
    """Parse the value NAME=PYTHON of the option `--peer`. Return the name and the path of the Python interpreter."""
    name, _, python = text.partition("=")
    if name not in PEERS or not python:
        raise argparse.ArgumentTypeError(f"'{text}' is not NAME=PYTHON with one of the names {', '.join(PEERS)}")
    if PEERS[name].version(python) is None:
        raise argparse.ArgumentTypeError(f"'{python}' is no interpreter that has {PEERS[name].package}")
    return name, python


def engine_argument(text: str) -> tuple[str, list[str]]:
    """Parse the value NAME=COMMAND of the option `--engine`. Return the name and the words of the command."""
    name, _, command = text.partition("=")
    if not name.startswith(f"{OURS} ") or not command:
        raise argparse.ArgumentTypeError(f"'{text}' is not '{OURS} NAME=COMMAND'")
    return name, shlex.split(command)


def positive(text: str) -> int:
    """Parse an option's value that must be an integer of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is no positive number")
    return int(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--rows", type=row_names, default=ROWS)
    parser.add_argument("--turns", type=positive, default=5)
    parser.add_argument("--threads", type=positive, default=2)
    parser.add_argument("--peer", type=peer_argument, action="append", default=[])
    parser.add_argument("--install-peers", type=Path, metavar="DIR")
    parser.add_argument("--engine", type=engine_argument, action="append", default=[], metavar="NAME=COMMAND")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    try:
        model = local_path(arguments.model)
    except HelexaError as error:
        raise SystemExit(str(error)) from None
    if not model.is_file():
        raise SystemExit(f"{model} is no file, and the peers read GGUF files only")
    pythons = dict(arguments.peer)
    if arguments.install_peers:
        wanted = [name for name in PEERS if name not in pythons]
        pythons |= {name: PEERS[name].install(arguments.install_peers / name) for name in wanted}
    tail = [str(model), "--rows", arguments.rows, "--threads", str(arguments.threads)]
    commands = {OURS: [sys.executable, str(FOLDER / "engine.py"), *tail]}
    commands |= {name: [python, str(FOLDER / "peers" / PEERS[name].script), *tail] for name, python in pythons.items()}
    commands |= {name: [*command, *tail] for name, command in arguments.engine}
    head = {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "model": {"name": model.name, "bytes": model.stat().st_size},
        "turns": arguments.turns,
        "threads": arguments.threads,
        "machine": machine(),
        "commit": commit(),
        "versions": versions() | {name: PEERS[name].description(python) for name, python in pythons.items()},
    }
    comparison, failures = compare(commands, arguments.turns)
    if arguments.out:
        snapshot = head | {"failures": failures, "rows": comparison.snapshot()}
        arguments.out.write_text(json.dumps(snapshot, indent=1) + "\n")
    print(comparison.table())


if __name__ == "__main__":
    main()
