"""Vetted command lines: shell command lines that are known to only read, and only in the session's folders.

If the user chooses "always allow" for a vetted line, the permission applies to all vetted lines with the same command.
For any other line, the permission applies to exactly that line in the same session. A command line is vetted if all of
the following conditions hold:

1. Each word of the line matches `_WORD`. So the line contains no quote, variable, pattern, substitution, redirection,
   pipe or second command, and the shell passes each word to the command unchanged.
2. The line begins with a command in `_COMMANDS`.
3. Each option matches the command's regular expression in full, which allows only harmless options. A harmless option
   cannot run a program, write a file, read a file named in the option, or follow symbolic links out of the folders.
4. Each other word is a relative path without `..` that is in the session's folders after links are resolved. This
   condition also applies to words that are not paths, such as revisions and search patterns.
5. `git` runs in the folder that contains `.git`, and the configuration in `.git` names no programs and no other files
   (see `git_repository`). The tools write into `.git` only with the user's permission.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from helexa.acp.host.boundary import Boundary, OutOfBounds
from helexa.acp.tools.git_repository import runs_no_program

_WORD = re.compile(r"(?:[A-Za-z0-9_./:@%+,^-]|(?<=[A-Za-z0-9])[=~])+")

_NUMBER = r"-n?\d+|-n"
_DIFF = (
    r"-[pubwMCR]+|-U\d+|--unified=\d+|--(stat|shortstat|numstat|dirstat|summary|raw|name-only|name-status|patch|no-patch"
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
    """The arguments of a command that a vetted command line may contain (a line known to only read files).

    Attributes:
        options: regular expression that each option must match in full.
        takes_words: whether arguments that are not options, such as paths, are allowed.
    """

    options: str
    takes_words: bool = True


_COMMANDS: Mapping[str, _Command] = {
    "pwd": _Command(r"-[LP]", takes_words=False),
    "ls": _Command(r"-[1AaBCcFfGghiklmnopqRrSstUuvXx]+|--(all|almost-all|human-readable|recursive|reverse|size)"),
    "cat": _Command(r"-[AbEensTtuv]+"),
    "head": _Command(rf"{_NUMBER}|-c\d*|-[qv]|--(lines|bytes)=\d+"),
    "tail": _Command(rf"{_NUMBER}|-[nc]\+?\d+|-c|-[qv]|--(lines|bytes)=\d+"),
    "wc": _Command(r"-[clmwL]+|--(bytes|chars|lines|words|max-line-length)"),
    "grep": _Command(
        r"-[cEFGHhiLlnoPqrsvwx]+|-[ABCm]\d+|--(recursive|ignore-case|line-number|count|files-with-matches|word-regexp)"
    ),
    "git status": _Command(
        r"-[sbv]+|-u(no|normal|all)|--(short|branch|long|verbose|ignored|show-stash|porcelain(=v[12])?"
        r"|untracked-files(=(no|normal|all))?)"
    ),
    "git diff": _Command(_DIFF),
    "git log": _Command(_LOG),
    "git show": _Command(_LOG),
    "git blame": _Command(r"-[wMCsetlf]+|-L\d+,\+?\d+|--(porcelain|line-porcelain)"),
    "git ls-files": _Command(r"-[cdmoskut]+|--(cached|deleted|modified|others|stage|exclude-standard|full-name)"),
    "git rev-parse": _Command(r"--(short|abbrev-ref|verify|show-toplevel|show-prefix|is-inside-work-tree)"),
    "git branch": _Command(r"-[arv]+|-vv|--(all|remotes|verbose|list|show-current)", takes_words=False),
}


def vetted_command(line: str, folder: Path, boundary: Boundary) -> str | None:
    """Check whether a command line is vetted (known to only read files), and return its command.

    Args:
        line: the command line.
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
    if command is None or (words[0] == "git" and not runs_no_program(folder, boundary)):
        return None
    for word in words[len(name.split()) :]:
        if word.startswith("-"):
            if word != "--" and not re.fullmatch(command.options, word):
                return None
        elif not command.takes_words or not _is_within(word, folder, boundary):
            return None
    return name


def _is_within(word: str, folder: Path, boundary: Boundary) -> bool:
    if word.startswith("/") or ".." in word.split("/"):
        return False
    try:
        boundary.resolve(str(folder / word))
    except OutOfBounds:
        return False
    return True
