"""The program of the search process: reads a `Search` as JSON from stdin and writes `SearchResults` to stdout."""

import re
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import msgspec
from pathspec import GitIgnoreSpec

from helexa.acp.tools.excerpt import printable
from helexa.acp.tools.search.ignored import files_below
from helexa.acp.tools.search.search import Match, Search, SearchResults

_MAX_FILES = 200_000
_MAX_FILE_BYTES = 4 << 20
_MAX_LINE_CHARACTERS = 300
_MAX_BRACES = 64


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
    for path in [request.file] if request.file is not None else islice(files_below(folder), _MAX_FILES):
        if files is not None and not files.match_file(path):
            continue
        for match in _matches(folder, path, expression) if expression else (Match(printable(path)),):
            if len(matches) == request.max_results:
                return SearchResults(tuple(matches), has_more=True)
            matches.append(match)
    return SearchResults(tuple(matches))


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
