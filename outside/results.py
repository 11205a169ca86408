"""Compares the outcomes of checks with the list of known failures, and formats the outcomes as tables and JSON."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from programs import KnownFailure, Program

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"


@dataclass(frozen=True)
class Check:
    """The outcome of one check: `passed`, `failed` or `skipped`. `reason` says why the check failed or was skipped."""

    name: str
    outcome: str
    reason: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class Result:
    """The outcomes of all checks of one program."""

    program: Program
    checks: tuple[Check, ...]

    def count(self, outcome: str) -> int:
        """Return how many checks of the program have this outcome (passed, failed or skipped)."""
        return sum(check.outcome == outcome for check in self.checks)


@dataclass(frozen=True)
class Verdict:
    """Differences between the outcomes of a run and the list of known failures in programs.toml.

    Attributes:
        unexpected: failed checks that are not known failures, with the names of their programs.
        known: failed checks that are known failures, with the names of their programs and the causes.
        mended: known failures whose checks have all passed in this run.
    """

    unexpected: list[tuple[str, Check]]
    known: list[tuple[str, Check, str]]
    mended: list[KnownFailure]

    @property
    def exit_status(self) -> int:
        """Exit status of the run: 1 if a check failed unexpectedly or a known failure has passed, else 0."""
        return int(bool(self.unexpected or self.mended))


def judge(results: Iterable[Result], known_failures: Iterable[KnownFailure]) -> Verdict:
    """Compare the outcomes of all checks with the list of known failures."""
    listed = list(known_failures)
    verdict = Verdict([], [], [])
    seen: dict[KnownFailure, set[str]] = {}
    for result in results:
        name = result.program.name
        for check in result.checks:
            entry = _entry(listed, name, check)
            if entry:
                seen.setdefault(entry, set()).add(check.outcome)
            if check.outcome == FAILED and entry:
                verdict.known.append((name, check, entry.cause))
            elif check.outcome == FAILED:
                verdict.unexpected.append((name, check))
    verdict.mended.extend(entry for entry, outcomes in seen.items() if outcomes == {PASSED})
    return verdict


def table(results: Iterable[Result]) -> str:
    """Return a Markdown table with the numbers of passed, failed and skipped checks of each program."""
    rows = [("Program", "Version", "Passed", "Failed", "Skipped")]
    for result in results:
        reasons = {check.reason for check in result.checks if check.outcome == SKIPPED}
        skipped = f"{result.count(SKIPPED)} ({'; '.join(sorted(reasons))})" if reasons else "0"
        counts = str(result.count(PASSED)), str(result.count(FAILED))
        rows.append((result.program.name, result.program.version or "-", *counts, skipped))
    return _markdown(rows)


def to_json(results: Iterable[Result], about: dict[str, Any]) -> str:
    """Return the outcomes of a run as JSON text. `about` has further fields, such as date and commit of helexa."""
    programs = [
        {
            "name": result.program.name,
            "version": result.program.version,
            "part": result.program.part,
            "checks": [asdict(check) for check in result.checks],
        }
        for result in results
    ]
    return json.dumps({**about, "programs": programs}, indent=1, ensure_ascii=False) + "\n"


def merged(old: str, new: str, order: list[str]) -> str:
    """Return the results of an earlier run as JSON text, with the results of a new run in place of older ones.

    Args:
        old: results of the earlier run as JSON text.
        new: results of the new run as JSON text. The run may have tested only some of the programs.
        order: names of the programs to include, in this order.
    """
    before, after = json.loads(old), json.loads(new)
    programs = {program["name"]: program for program in (*before["programs"], *after["programs"])}
    chosen = [programs[name] for name in order if name in programs]
    return json.dumps(before | after | {"programs": chosen}, indent=1, ensure_ascii=False) + "\n"


def client_table(text: str, causes: Iterable[KnownFailure]) -> str:
    """Return the table of test results in docs/clients.md as Markdown text.

    Args:
        text: results of a run as JSON text.
        causes: known failures, whose causes are shown for failed checks.
    """
    listed = list(causes)
    rows = [("Program", "Version", "Part", "Checks passed", "What fails or was skipped")]
    for program in json.loads(text)["programs"]:
        checks = [Check(**check) for check in program["checks"]]
        passed = sum(check.outcome == PASSED for check in checks)
        notes = []
        for check in checks:
            entry = _entry(listed, program["name"], check)
            if check.outcome == FAILED:
                notes.append(f"{check.name}: {entry.cause if entry else 'fails'}")
            elif check.outcome == SKIPPED:
                notes.append(f"{check.name} skipped: {check.reason}")
        counted = f"{passed} of {len(checks)}"
        rows.append((program["name"], program["version"], program["part"], counted, "; ".join(notes)))
    return _markdown(rows)


def _entry(listed: Iterable[KnownFailure], program: str, check: Check) -> KnownFailure | None:
    return next((one for one in listed if one.program == program and one.check in (check.name, "*")), None)


def _markdown(rows: list[tuple[str, ...]]) -> str:
    cells = [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows]
    cells.insert(1, ["---"] * len(rows[0]))
    return "\n".join(f"| {' | '.join(row)} |" for row in cells) + "\n"
