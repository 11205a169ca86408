"""Recognizes git repositories in which commands that only read run no program that the repository names.

git runs programs that a configuration names, for example to filter or compare files. The agent's tools write into
`.git` only with the user's permission, but a configuration can lie elsewhere, or can name files that lie elsewhere.
"""

import re
from pathlib import Path

from helexa.acp.host.boundary import Boundary, OutOfBounds

_SETTINGS = {
    "core.fsmonitor": "false",
    "core.hooksPath": "/dev/null",
    "log.showSignature": "false",
    "protocol.allow": "never",
    "safe.bareRepository": "explicit",
}
HARDENED = {
    "GIT_OPTIONAL_LOCKS": "0",  # `git status` writes no index, which would run a hook
    "GIT_NO_LAZY_FETCH": "1",
    "GIT_CONFIG_COUNT": str(len(_SETTINGS)),
    **{f"GIT_CONFIG_KEY_{number}": key for number, key in enumerate(_SETTINGS)},
    **{f"GIT_CONFIG_VALUE_{number}": value for number, value in enumerate(_SETTINGS.values())},
}
"""Environment variables for git commands that only read: no hooks, no file-system monitor, no downloads."""

_MAX_BYTES = 1 << 16
_HEADER = re.compile(r'\[\s*([A-Za-z0-9.-]+)\s*(?:"(?:[^"\\]|\\.)*")?\s*\]')
_KEY = re.compile(r"([A-Za-z][A-Za-z0-9-]*)\s*(=|$)")
_HARMLESS_SECTIONS = re.compile(r"advice|branch|color|column|commit|fetch|gc|init|pull|push|rebase|status|tag|user")
_HARMLESS_KEYS = re.compile(
    r"core\.(abbrev|autocrlf|bare|compression|eol|filemode|ignorecase|logallrefupdates|longpaths|precomposeunicode"
    r"|preloadindex|quotepath|repositoryformatversion|safecrlf|symlinks|untrackedcache)"
    r"|extensions\.objectformat|remote\.(fetch|gh-resolved|prune|pushurl|tagopt|url)"
)


def runs_no_program(folder: Path, boundary: Boundary) -> bool:
    """Return whether git commands that only read run no program that the repository in `folder` names.

    This is true if all of the following conditions hold:

    * `.git` is a complete git directory, or a file that points to a work tree's part of a directory `.git`. Otherwise,
      git looks for a repository in other places.
    * The configuration has only settings that name no program and no other file.
    * The repository has no submodules, which have their own configurations.

    Args:
        folder: folder that contains `.git`, with symbolic links resolved.
        boundary: the folders that the session may access.
    """
    try:
        git = boundary.resolve(str(folder / ".git"))
        if git.real.name != ".git":  # a link to a folder in which the tools may write without a question
            return False
        common = git.real if git.real.is_dir() else _common_directory(git.real)
        return (
            common is not None
            and (common / "HEAD").is_file()
            and (common / "objects").is_dir()
            and (common / "refs").is_dir()
            and not (common / "modules").exists()
            and _is_harmless((common / "config").read_bytes()[: _MAX_BYTES + 1])
        )
    except (OutOfBounds, OSError, ValueError):
        return False


def _common_directory(file: Path) -> Path | None:
    """Return the directory `.git` of the repository to which the file `.git` of a linked work tree belongs."""
    text = file.read_bytes()[:4096].decode().removeprefix("gitdir: ").strip()
    target = (file.parent / text).resolve(strict=True)
    is_work_tree = target.parent.name == "worktrees" and target.parent.parent.name == ".git"
    return target.parent.parent if is_work_tree else None


def _is_harmless(config: bytes) -> bool:
    """Return whether a configuration has only settings that name no program and no other file."""
    if len(config) > _MAX_BYTES:
        return False
    section = ""
    for line in config.decode().splitlines():
        line = line.strip()
        if header := _HEADER.match(line):
            section, line = header[1].lower(), line[header.end() :].strip()
        if not line or line[0] in "#;":
            continue
        key = _KEY.match(line)
        if key is None or line.endswith("\\"):
            return False
        if not _HARMLESS_SECTIONS.fullmatch(section) and not _HARMLESS_KEYS.fullmatch(f"{section}.{key[1].lower()}"):
            return False
    return True
