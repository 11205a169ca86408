"""The search process: reads a `Search` from stdin and writes `Findings` to stdout."""

import os
import re
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
from pathspec import GitIgnoreSpec

from helexa.acp.tools.excerpt import printable
from helexa.acp.tools.search.search import Findings, Found, Search

_MOST_FILES = 200_000
_MOST_FILE_BYTES = 4 << 20
_MOST_LINE = 300
_MOST_BRACES = 64
_PASSED_OVER = frozenset(
    [".git", ".hg", ".svn", "node_modules", "__pycache__", ".venv", ".tox", ".mypy_cache", ".pytest_cache"]
)


def main() -> None:
    """Run one search."""
    question = msgspec.json.decode(sys.stdin.buffer.read(), type=Search)
    sys.stdout.buffer.write(msgspec.json.encode(find(question)))


def find(question: Search) -> Findings:
    """Search the files."""
    try:
        flags = re.IGNORECASE if question.ignore_case else re.NOFLAG
        expression = re.compile(question.text, flags) if question.text is not None else None
    except (re.error, RecursionError, OverflowError) as error:
        return Findings(error=f"The pattern is no regular expression: {error}")
    try:
        files = GitIgnoreSpec.from_lines(braces_expanded(question.files)) if question.files is not None else None
    except ValueError as error:
        return Findings(error=f"The pattern of files is wrong: {error}")
    folder = Path(question.folder)
    found: list[Found] = []
    for path in [question.file] if question.file is not None else files_below(folder):
        if files is not None and not files.match_file(path):
            continue
        for finding in _matches(folder, path, expression) if expression else (Found(printable(path)),):
            if len(found) == question.most:
                return Findings(tuple(found), more=True)
            found.append(finding)
    return Findings(tuple(found))


def files_below(folder: Path) -> list[str]:
    """Return the sorted files below the folder.

    These are the files that git would track, or all files outside cache folders if git lists none.
    """
    listed = _listed_by_git(folder) or list(_walked(folder))
    return sorted(listed[:_MOST_FILES])


def braces_expanded(pattern: str) -> list[str]:
    """Return the patterns without braces: `*.{js,ts}` becomes `*.js` and `*.ts`."""
    patterns, done = [pattern], []
    while patterns and len(patterns) + len(done) <= _MOST_BRACES:
        first = patterns.pop()
        if match := re.search(r"\{([^{}]*,[^{}]*)\}", first):
            patterns += [first[: match.start()] + choice + first[match.end() :] for choice in match[1].split(",")]
        else:
            done.append(first)
    return done + patterns


def _listed_by_git(folder: Path) -> list[str]:
    """Return the files that git lists; empty if the folder is not in a repository or git is missing."""
    command = ["git", "-c", "core.fsmonitor=false", "-C", str(folder), "ls-files", "-zco", "--exclude-standard"]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        listing = subprocess.run(command, capture_output=True, env=environ, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return []
    names = dict.fromkeys(os.fsdecode(name) for name in listing.split(b"\0") if name)
    return [name for name in names if _is_file(folder / name)]


def _walked(folder: Path) -> Iterator[str]:
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in _PASSED_OVER]
        for name in names:
            path = Path(parent, name)
            if _is_file(path):
                yield str(path.relative_to(folder))


def _is_file(path: Path) -> bool:
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return False


def _matches(folder: Path, path: str, expression: re.Pattern[str]) -> Iterator[Found]:
    try:
        with (folder / path).open("rb") as file:
            data = file.read(_MOST_FILE_BYTES + 1)
    except OSError:
        return
    if len(data) > _MOST_FILE_BYTES or b"\0" in data:
        return
    for number, line in enumerate(data.decode(errors="replace").splitlines(), 1):
        if match := expression.search(line):
            start = max(0, match.start() - _MOST_LINE // 3) if len(line) > _MOST_LINE else 0
            yield Found(printable(path), number, line[start : start + _MOST_LINE])


if __name__ == "__main__":
    main()
