"""The search program: reads a Search from stdin, writes SearchResults to stdout.

The program does not call `git ls-files`, because git runs programs that a repository's configuration names. A folder
that the model chose can contain such a repository.
"""

import os
import re
import stat
import sys
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

import msgspec
from msgspec import Struct
from pathspec import GitIgnoreSpec

from helexa.acp.tools.boundary_and_secrets import is_secret
from helexa.acp.tools.excerpt import printable

_MAX_IGNORE_FILE_BYTES = 1 << 20
_PASSED_OVER = frozenset(
    [".git", ".hg", ".svn", "node_modules", "__pycache__", ".venv", ".tox", ".mypy_cache", ".pytest_cache"]
)

# Ignore rules, most specific first. Each rule is the path of a folder with a trailing slash, and the patterns of the
# ignore files in the folder.
_Rules = tuple[tuple[str, GitIgnoreSpec], ...]


def _files_below(folder: Path) -> Iterator[str]:
    """Yield the sorted paths of all files below a folder, relative to the folder.

    Links are not followed. In a git repository, files are omitted that match the `.gitignore` files,
    `.git/info/exclude` or `~/.config/git/ignore`, even if git tracks them. Outside a repository, files in well-known
    cache folders are omitted. If the folder itself is ignored, only the ignore files below the folder apply.
    """
    repository = next((one for one in (folder, *folder.parents) if (one / ".git").exists()), None)
    rules: _Rules = ()
    if repository is not None:
        rules = _read_rules(repository, (_user_ignore_file(), repository / ".git" / "info" / "exclude"))
        inner = [parent for parent in (folder, *folder.parents) if parent.is_relative_to(repository)]
        for parent in reversed(inner[1:]):
            rules = _with_rules_of(parent, rules)
        if any(_is_ignored(f"{parent}/", rules) for parent in inner[:-1]):
            rules = ()
    yield from _walk(folder, rules, _PASSED_OVER if repository is None else frozenset([".git"]))


def _walk(folder: Path, rules: _Rules, passed_over: frozenset[str]) -> Iterator[str]:
    # Paths to visit, relative to `folder`. A folder has the rules of the folders above it, a file has None.
    pending: list[tuple[str, _Rules | None]] = [("", rules)]
    while pending:
        path, rules_above = pending.pop()
        if rules_above is None:
            yield path
            continue
        try:
            with os.scandir(folder / path) as scan:
                entries = sorted(scan, key=lambda entry: entry.name + "/" * entry.is_dir(follow_symlinks=False))
        except OSError:
            continue
        here = _with_rules_of(folder / path, rules_above)
        for entry in reversed(entries):
            if entry.is_dir(follow_symlinks=False):
                if entry.name not in passed_over and not _is_ignored(f"{entry.path}/", here):
                    pending.append((f"{path}{entry.name}/", here))
            elif entry.is_file(follow_symlinks=False) and not _is_ignored(entry.path, here):
                pending.append((path + entry.name, None))


def _is_ignored(path: str, rules: _Rules) -> bool:
    for base, patterns in rules:
        if path.startswith(base) and (ignored := patterns.check_file(path[len(base) :]).include) is not None:
            return ignored
    return False


def _with_rules_of(folder: Path, rules: _Rules) -> _Rules:
    return _read_rules(folder, (folder / ".gitignore",)) + rules


def _read_rules(folder: Path, files: Iterable[Path]) -> _Rules:
    """Return the rules in ignore files, whose patterns are relative to `folder`."""
    lines = [line for file in files for line in _lines(file)]
    try:
        return ((f"{folder}/".replace("//", "/"), GitIgnoreSpec.from_lines(lines)),) if lines else ()
    except ValueError:  # git also skips invalid patterns
        return ()


def _lines(file: Path) -> list[str]:
    """Return the lines of an ignore file.

    The result is empty if the file is missing, a link, a device or larger than the limit.
    """
    try:
        # O_NONBLOCK: without it, opening a FIFO would wait for a writer.
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return []
    with os.fdopen(descriptor, "rb") as opened:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return []
        data = opened.read(_MAX_IGNORE_FILE_BYTES + 1)
    return [] if len(data) > _MAX_IGNORE_FILE_BYTES else data.decode(errors="surrogateescape").splitlines()


def _user_ignore_file() -> Path:
    configuration = os.environ.get("XDG_CONFIG_HOME")
    return (Path(configuration) if configuration else Path.home() / ".config") / "git" / "ignore"


_MAX_FILES = 200_000
_MAX_FILE_BYTES = 4 << 20
_MAX_LINE_CHARACTERS = 300
_MAX_BRACES = 64
_MAX_SECRETS = 20  # maximum number of secret files that are reported as not searched


class Search(Struct, frozen=True):
    """The parameters of a search for files or lines, which the search process reads.

    Lines of files that usually contain secrets (see `is_secret`), and lines of the agent's own files, are searched
    only if `file` names the file.
    """

    folder: str  # the folder to search. Symbolic links are not followed, and files that git ignores are skipped.
    file: str | None = None  # name of the only file in `folder` to search, or None for all files
    # Pattern of the files to search, or None for all files. The syntax is that of .gitignore, with braces such as
    # `*.{js,ts}` in addition.
    files: str | None = None
    text: str | None = None  # regular expression to find in lines. If None, the search returns files, not lines.
    ignore_case: bool = False  # whether `text` ignores case
    max_results: int = 200  # maximum number of results
    below: str = "."  # path of `folder` relative to the session's folder, by which files with secrets are recognized
    own: tuple[str, ...] = ()  # files and folders of the agent itself, with symbolic links resolved; see `Boundary`


class Match(Struct, frozen=True):
    """A matching file, or a matching line of a file, that the search process found."""

    path: str  # path of the file, relative to the searched folder
    line: int | None = None  # line number, counted from 1, or None if files were searched
    text: str = ""  # the line, shortened if it is long


class SearchResults(Struct, frozen=True):
    """The results of a search, sorted by path, which the search process writes."""

    matches: tuple[Match, ...] = ()  # the matching files or lines, at most `Search.max_results`
    has_more: bool = False  # whether there are more matches, which were omitted
    # files that were not searched because they usually contain secrets or are the agent's own, at most 20
    secrets: tuple[str, ...] = ()
    error: str | None = None  # error message if a pattern is invalid, else None


def main() -> None:
    """Read a `Search` from stdin and write the results to stdout, as JSON."""
    request = msgspec.json.decode(sys.stdin.buffer.read(), type=Search)
    sys.stdout.buffer.write(msgspec.json.encode(find(request)))


def find(request: Search) -> SearchResults:
    """Return the files or lines that match `request`, or an error about its pattern.

    Only the first `_MAX_FILES` files of a folder are considered. Lines are not searched in files that contain NUL bytes
    or more than `_MAX_FILE_BYTES`.
    """
    try:
        flags = re.IGNORECASE if request.ignore_case else re.NOFLAG
        expression = re.compile(request.text, flags) if request.text is not None else None
    except (re.error, RecursionError, OverflowError) as error:
        return SearchResults(error=f"The pattern is not a regular expression: {error}; escape special characters")
    try:
        files = GitIgnoreSpec.from_lines(braces_expanded(request.files)) if request.files is not None else None
    except ValueError as error:
        return SearchResults(error=f"The file pattern is invalid: {error}; write a pattern such as `*.py`")
    folder, own = Path(request.folder), tuple(map(Path, request.own))
    matches: list[Match] = []
    secrets: list[str] = []
    for path in [request.file] if request.file is not None else islice(_files_below(folder), _MAX_FILES):
        if files is not None and not files.match_file(path):
            continue
        if (
            expression
            and request.file is None
            and (is_secret(Path(request.below, path)) or any((folder / path).is_relative_to(entry) for entry in own))
        ):
            secrets.append(printable(path))
            continue
        for match in _matches(folder, path, expression) if expression else (Match(printable(path)),):
            if len(matches) == request.max_results:
                return SearchResults(tuple(matches), True, tuple(secrets[:_MAX_SECRETS]))
            matches.append(match)
    return SearchResults(tuple(matches), secrets=tuple(secrets[:_MAX_SECRETS]))


def braces_expanded(pattern: str) -> list[str]:
    """Return patterns without braces that together match the same files as `pattern`.

    For example, `*.{js,ts}` is expanded to `*.js` and `*.ts`. Beyond about 64 patterns, braces remain.
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
