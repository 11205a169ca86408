"""Lists files without those that git ignores. Reads ignore files only, and runs no program.

`git ls-files` is not used: git runs programs that a repository's configuration names, and a folder that the model chose
can contain such a repository.
"""

import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from pathspec import GitIgnoreSpec

_MAX_IGNORE_FILE_BYTES = 1 << 20
_PASSED_OVER = frozenset(
    [".git", ".hg", ".svn", "node_modules", "__pycache__", ".venv", ".tox", ".mypy_cache", ".pytest_cache"]
)

_Rules = tuple[tuple[str, GitIgnoreSpec], ...]
"""Ignore rules, the most specific first: the folder to which they apply, as a path with a slash, and patterns."""


def files_below(folder: Path) -> Iterator[str]:
    """Yield the sorted relative paths of the regular files in a folder and its subfolders.

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
    pending: list[tuple[str, _Rules | None]] = [("", rules)]  # relative paths; None for a file
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
    except ValueError:  # git, too, passes over invalid patterns
        return ()


def _lines(file: Path) -> list[str]:
    """Return the lines of an ignore file; none if it is missing, a link, a device or larger than the limit."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)  # a FIFO would block
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
