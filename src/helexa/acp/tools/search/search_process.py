"""The program of the search process: reads a `Search` as JSON from stdin and writes `SearchResults` to stdout."""

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
from helexa.acp.tools.search.search import Match, Search, SearchResults

_MAX_FILES = 200_000
_MAX_FILE_BYTES = 4 << 20
_MAX_LINE_CHARACTERS = 300
_MAX_BRACES = 64
_PASSED_OVER = frozenset(
    [".git", ".hg", ".svn", "node_modules", "__pycache__", ".venv", ".tox", ".mypy_cache", ".pytest_cache"]
)


def main() -> None:
    """Read a `Search` as JSON from stdin, run the search, and write the results as JSON to stdout."""
    request = msgspec.json.decode(sys.stdin.buffer.read(), type=Search)
    sys.stdout.buffer.write(msgspec.json.encode(find(request)))


def find(request: Search) -> SearchResults:
    """Search the files and return the matching files or lines."""
    try:
        flags = re.IGNORECASE if request.ignore_case else re.NOFLAG
        expression = re.compile(request.text, flags) if request.text is not None else None
    except (re.error, RecursionError, OverflowError) as error:
        return SearchResults(error=f"The pattern is not a regular expression: {error}")
    try:
        files = GitIgnoreSpec.from_lines(braces_expanded(request.files)) if request.files is not None else None
    except ValueError as error:
        return SearchResults(error=f"The file pattern is invalid: {error}")
    folder = Path(request.folder)
    matches: list[Match] = []
    for path in [request.file] if request.file is not None else files_below(folder):
        if files is not None and not files.match_file(path):
            continue
        for match in _matches(folder, path, expression) if expression else (Match(printable(path)),):
            if len(matches) == request.max_results:
                return SearchResults(tuple(matches), has_more=True)
            matches.append(match)
    return SearchResults(tuple(matches))


def files_below(folder: Path) -> list[str]:
    """Return the sorted relative paths of the files in the folder and its subfolders.

    In a git repository, files that git ignores are omitted. Outside a repository, or if git lists no files, only files
    in well-known cache folders are omitted.
    """
    listed = _listed_by_git(folder) or list(_walked(folder))
    return sorted(listed[:_MAX_FILES])


def braces_expanded(pattern: str) -> list[str]:
    """Return patterns without braces that together match the same files as `pattern`.

    For example, `*.{js,ts}` is expanded to `*.js` and `*.ts`.
    """
    patterns, expanded = [pattern], []
    while patterns and len(patterns) + len(expanded) <= _MAX_BRACES:
        first = patterns.pop()
        if match := re.search(r"\{([^{}]*,[^{}]*)\}", first):
            patterns += [first[: match.start()] + choice + first[match.end() :] for choice in match[1].split(",")]
        else:
            expanded.append(first)
    return expanded + patterns


def _listed_by_git(folder: Path) -> list[str]:
    """Return the tracked and the untracked files in the folder, without files that git ignores.

    Return an empty list if the folder is not in a git repository or git is not installed.
    """
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


def _matches(folder: Path, path: str, expression: re.Pattern[str]) -> Iterator[Match]:
    try:
        with (folder / path).open("rb") as file:
            data = file.read(_MAX_FILE_BYTES + 1)
    except OSError:
        return
    if len(data) > _MAX_FILE_BYTES or b"\0" in data:
        return
    for number, line in enumerate(data.decode(errors="replace").splitlines(), 1):
        if span_of_text := expression.search(line):
            start = max(0, span_of_text.start() - _MAX_LINE_CHARACTERS // 3) if len(line) > _MAX_LINE_CHARACTERS else 0
            yield Match(printable(path), number, line[start : start + _MAX_LINE_CHARACTERS])


if __name__ == "__main__":
    main()
