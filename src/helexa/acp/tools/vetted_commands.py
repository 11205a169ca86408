"""Vetted command lines, which are known to only read files.

If the user chooses "always allow" for a vetted line, the permission applies to all vetted lines with the same command.
For any other line, the permission applies to exactly that line in the same session.

git needs special care, because it runs programs that its configuration names, for example to filter or compare files.
The agent's tools write into `.git` only with the user's permission, but git can also read a configuration from another
place, and a configuration can name files in other places.

A command line is vetted if all of the following conditions hold:

1. Each word of the line matches `_WORD`. So the line contains no quote, variable, pattern, substitution, redirection,
   pipe or second command, and the shell passes each word to the command unchanged.
2. The line begins with a command in `_COMMANDS`.
3. Each option matches the command's regular expression in full, which allows only harmless options. A harmless option
   cannot run a program, write a file, read a file named in the option, read all files of a folder, or follow symbolic
   links out of the folders.
4. Each other word is a relative path without `..` that is in the session's folders after links are resolved, and that
   is not the path of a file with secrets (see `is_secret`). This condition also applies to words that are not paths,
   such as revisions and search patterns, and to each part of `HEAD:path`.
5. No word of a git command line can be the id of an object, because `git show ID` would print a committed file with
   secrets by its id. `HEAD:path` is vetted only for `git show`: `git diff` of two trees shows paths below the trees,
   so that `git diff HEAD:.ssh HEAD~1:.ssh` would not recognize the secrets.
6. `git` runs in the folder that contains `.git`, and the configuration in `.git` names no programs and no other files
   (see `_runs_no_program`). The tools write into `.git` only with the user's permission.
7. The line runs with `vetted_environment`.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from helexa.acp.tools.boundary_and_secrets import Boundary, OutOfBounds

_SETTINGS = {
    "core.attributesFile": str(Path(__file__).with_name("secret_files.gitattributes")),
    "core.fsmonitor": "false",
    "core.hooksPath": "/dev/null",
    "log.showSignature": "false",
    "protocol.allow": "never",
    "safe.bareRepository": "explicit",
}
HARDENED = {
    "GIT_OPTIONAL_LOCKS": "0",  # keeps `git status` from writing the index, because a write would run a hook
    "GIT_NO_LAZY_FETCH": "1",
    "GIT_CONFIG_COUNT": str(len(_SETTINGS)),
    **{f"GIT_CONFIG_KEY_{number}": key for number, key in enumerate(_SETTINGS)},
    **{f"GIT_CONFIG_VALUE_{number}": value for number, value in enumerate(_SETTINGS.values())},
}
"""Environment of git commands that only read: no hooks, no downloads.

The commands show files that usually contain secrets as binary files, without their text.
"""

_MAX_SHOWN_BYTES = 1 << 16
# Mode of a submodule in the file `index` of git. If other data contains these bytes by chance, the command line is not
# vetted, and the user is asked.
_GITLINK = b"\0\0\xe0\0"
# Entries of `.git` that git commands with the environment `HARDENED` do not read. They are not searched for links,
# because they are large or are often links themselves.
_NOT_READ = frozenset(["hooks", "lfs"])
_HEADER = re.compile(r'\[\s*([A-Za-z0-9.-]+)\s*(?:"(?:[^"\\]|\\.)*")?\s*\]')
_KEY = re.compile(r"([A-Za-z][A-Za-z0-9-]*)\s*(=|$)")
_HARMLESS_SECTIONS = re.compile(r"advice|branch|color|column|commit|fetch|gc|init|pull|push|rebase|status|tag|user")
_HARMLESS_KEYS = re.compile(
    r"core\.(abbrev|autocrlf|bare|compression|eol|filemode|ignorecase|logallrefupdates|longpaths|precomposeunicode"
    r"|preloadindex|quotepath|repositoryformatversion|safecrlf|symlinks|untrackedcache)"
    r"|extensions\.objectformat|remote\.(fetch|gh-resolved|prune|pushurl|tagopt|url)"
)


def _runs_no_program(folder: Path, boundary: Boundary) -> bool:
    """Return whether git commands that only read run no program of the repository.

    This is true if all of the following conditions hold:

    * `.git` is a complete git directory, or a file that points to a work tree's part of a directory `.git`. Otherwise,
      git looks for a repository in other places.
    * The configuration has only settings that name no program and no other file.
    * The repository has no submodules, which have their own configurations.
    * The repository reads no objects, references and settings of other folders, also not through symbolic links.

    Args:
        folder: folder that contains `.git`, with symbolic links resolved.
        boundary: the folders that the session may access.
    """
    try:
        git = boundary.resolve(str(folder / ".git"))
        if git.real.name != ".git":  # `.git` is a link to another folder, in which the tools may write without asking
            return False
        if git.real.is_dir():
            own = common = git.real
            complete = not (own / "commondir").exists()  # git's file `commondir` names another folder with settings
        else:
            own = _linked_directory(git.real)
            common = own.parent.parent
            complete = own.parent.name == "worktrees" and common.name == ".git" and _common_directory(own) == common
        return (
            complete
            and (common / "HEAD").is_file()
            and all((common / name).is_dir() for name in ("objects", "refs"))
            and not _has_links(common)
            and not (common / "objects/info/alternates").exists()
            and not (common / "modules").exists()
            and not any(_GITLINK in index.read_bytes() for index in (*own.glob("index"), *own.glob("sharedindex.*")))
            and _is_harmless((common / "config").read_bytes()[: _MAX_SHOWN_BYTES + 1])
        )
    except (OutOfBounds, OSError, ValueError):
        return False


def _linked_directory(file: Path) -> Path:
    """Return the git directory that `file`, the `.git` of a linked work tree, names."""
    text = file.read_bytes()[:4096].decode().removeprefix("gitdir: ").strip()
    return (file.parent / text).resolve(strict=True)


def _common_directory(own: Path) -> Path:
    """Return the folder with the configuration of the linked git directory `own`."""
    return (own / (own / "commondir").read_bytes()[:4096].decode().strip()).resolve(strict=True)


def _has_links(git: Path) -> bool:
    """Return whether git reads a symbolic link anywhere in the git directory `git`."""
    not_read = {f"{git}/{name}" for name in _NOT_READ}
    pending = [str(git)]
    while pending:
        with os.scandir(pending.pop()) as entries:
            for entry in entries:
                if entry.path in not_read:
                    continue
                if entry.is_symlink():
                    # A link can lead to another repository, whose configuration is not checked.
                    return True
                if entry.is_dir(follow_symlinks=False):
                    pending.append(entry.path)
    return False


def _is_harmless(config: bytes) -> bool:
    """Return whether all settings of a git configuration name no program or file."""
    if len(config) > _MAX_SHOWN_BYTES:
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


_WORD = re.compile(r"(?:[A-Za-z0-9_./:@%+,^-]|(?<=[A-Za-z0-9])[=~])+")
# The pattern has `-g`, because git accepts `TAG-COUNT-gID`, the output of `git describe`, as the name of an object.
_OBJECT_ID = re.compile(r"(^|\.\.|\^|-g)[0-9A-Fa-f]{4,}($|\.\.|[\^~:@])")
_NUMBER = r"-n?\d+|-n"
_DIFF = (
    r"-[pubwMCR]+|-U\d+|--unified=\d+|--(stat|shortstat|numstat|dirstat|summary|name-only|name-status|patch|no-patch"
    r"|cached|staged|check|minimal|word-diff|no-ext-diff|no-textconv|no-renames|find-renames|ignore-all-space"
    r"|ignore-space-change|ignore-blank-lines|no-color|color=(always|never|auto)|diff-filter=[A-Za-z]+|merge-base)"
)
_LOG = (
    rf"{_DIFF}|{_NUMBER}|--(oneline|graph|decorate|no-decorate|all|branches|tags|merges|no-merges|first-parent|reverse"
    r"|follow|abbrev-commit|max-count=\d+|date=[a-z0-9-]+|(since|until|after|before|author|grep)=[^=]+)"
    r"|--(pretty|format)=(?!.*%[^A-Za-z]*G).*"  # %G, also with a modifier as in %+G, runs gpg
)


@dataclass(frozen=True, slots=True)
class _Command:
    """The arguments of a command that a vetted command line may contain."""

    options: str  # regular expression that each option must match in full
    takes_words: bool = True  # whether arguments that are not options, such as paths, are allowed


_COMMANDS: Mapping[str, _Command] = {
    "pwd": _Command(r"-[LP]", takes_words=False),
    "ls": _Command(r"-[1AaBCcFfGghiklmnopqRrSstUuvXx]+|--(all|almost-all|human-readable|recursive|reverse|size)"),
    "cat": _Command(r"-[AbEensTtuv]+"),
    "head": _Command(rf"{_NUMBER}|-c\d*|-[qv]|--(lines|bytes)=\d+"),
    "tail": _Command(rf"{_NUMBER}|-[nc]\+?\d+|-c|-[qv]|--(lines|bytes)=\d+"),
    "wc": _Command(r"-[clmwL]+|--(bytes|chars|lines|words|max-line-length)"),
    "grep": _Command(
        r"-[cEFGHhiLlnoPqsvwx]+|-[ABCm]\d+|--(ignore-case|line-number|count|files-with-matches|word-regexp)"
    ),
    "git status": _Command(
        r"-[sbv]+|-u(no|normal|all)|--(short|branch|long|verbose|ignored|show-stash|porcelain(=v1)?"
        r"|untracked-files(=(no|normal|all))?)"
    ),
    "git diff": _Command(_DIFF),
    "git log": _Command(_LOG),
    "git show": _Command(_LOG),
    "git blame": _Command(r"-[wMCsetlf]+|-L\d+,\+?\d+|--(porcelain|line-porcelain)"),
    "git ls-files": _Command(r"-[cdmokt]+|--(cached|deleted|modified|others|exclude-standard|full-name)"),
    "git rev-parse": _Command(r"--(short|abbrev-ref|verify|show-toplevel|show-prefix|is-inside-work-tree)"),
    "git branch": _Command(r"-[arv]+|-vv|--(all|remotes|verbose|list|show-current)", takes_words=False),
}


def vetted_command(line: str, folder: Path, boundary: Boundary) -> str | None:
    """Return the command of a vetted line (known to only read), or None.

    Args:
        folder: working directory of the shell, with symbolic links resolved.
        boundary: the folders that the session may access.

    Returns:
        The name of the command, for example `git diff`. None if the line may do more than read files in the session's
        folders.
    """
    words = [word for word in line.split(" ") if word]
    if not words or not all(_WORD.fullmatch(word) for word in words):
        return None
    name = " ".join(words[:2] if words[0] == "git" else words[:1])
    command = _COMMANDS.get(name)
    if command is None or (words[0] == "git" and not _runs_no_program(folder, boundary)):
        return None
    for word in words[len(name.split()) :]:
        if word.startswith("-"):
            if word != "--" and not re.fullmatch(command.options, word):
                return None
        elif not command.takes_words or not _is_within(word, folder, boundary) or _may_be_object(word, name):
            return None
    return name


def vetted_environment(name: str, boundary: Boundary) -> Mapping[str, str]:
    """Return environment variables for a vetted line with the command `name`."""
    # `PATH` has no relative folders and no folders of the session, so that the shell finds no program of the project
    # with the name of the command, for example in an activated `.venv/bin`. The shell does not read the file that the
    # variable `BASH_ENV` names.
    folders = [folder for folder in os.environ.get("PATH", "").split(os.pathsep) if folder.startswith("/")]
    path = os.pathsep.join(folder for folder in folders if not _is_of_session(folder, boundary)) or os.defpath
    return {"PATH": path, "BASH_ENV": ""} | (HARDENED if name.startswith("git ") else {})


def _is_of_session(folder: str, boundary: Boundary) -> bool:
    try:
        boundary.resolve(folder)
    except OutOfBounds:
        return False
    return True


def _may_be_object(word: str, name: str) -> bool:
    """Return whether a word of a git command can name an object whose path is unknown.

    Without the path, the object cannot be recognized as a file with secrets.
    """
    return name.startswith("git ") and (_OBJECT_ID.search(word) is not None or (":" in word and name != "git show"))


def _is_within(word: str, folder: Path, boundary: Boundary) -> bool:
    if word.startswith("/") or ".." in word.split("/"):
        return False
    try:
        return not any(boundary.resolve(str(folder / part)).secret for part in (word, *word.split(":")))
    except OutOfBounds:
        return False
