"""What a shell command runs, as far as that can be told for certain: so that an allowance for one is not one for more.

Whatever could run something that is not plainly written (a substitution, a redirection into a file, a variable as the
program, a keyword) makes a command line unclear, and an unclear one is asked about each time.
"""

import re
import shlex

_RUN_ANYTHING = """
    awk bash bun bunx busybox chroot dash deno doas docker env find fish gawk ionice irb kubectl ksh lua make nice node
    nohup npx nsenter parallel perl php pipx pnpm podman powershell pwsh pypy python ruby script sed setsid sh ssh
    strace stdbuf sudo su tclsh timeout tmux uv uvx watch xargs zsh
"""
_CARRIERS = frozenset(_RUN_ANYTHING.split())  # an allowance by their first words would be one for everything
_SHELL_WORDS = """
    if then elif else fi for in while until do done case esac select function time coproc { } [[ ]] ! . : alias bind
    builtin command enable eval exec export set source trap unset
"""
_KEYWORDS = frozenset(_SHELL_WORDS.split())
_HARMLESS_REDIRECTION = re.compile(r"(?<![^\s;|&])(?:2>&1|[12&]?>\s?/dev/null|</dev/null)(?=[\s;|&]|$)")
_PLAIN = re.compile(r"[A-Za-z0-9_./+:@%-]+")
_SUBCOMMAND = re.compile(r"[a-z][a-z0-9:_-]*")
_BETWEEN = frozenset({";", "&&", "||", "|"})
_UNCLEAR = ("`", "$(", "${", "$'", '$"', "\\", "\n", "\r")


def simple_commands(line: str) -> list[tuple[str, ...]] | None:
    """The words of each command that a line runs, one after the other or piped; None if that is not plain to see."""
    line = _HARMLESS_REDIRECTION.sub(" ", line.strip())
    if any(sign in line for sign in _UNCLEAR):
        return None
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.commenters = ""
    lexer.whitespace_split = True
    commands: list[list[str]] = [[]]
    try:
        for token in lexer:
            if token in _BETWEEN:
                commands.append([])
            elif set(token) & set("();<>|&"):
                return None  # a group, a redirection, the background, or such a sign within quotes
            else:
                commands[-1].append(token)
    except ValueError:  # a quote is not closed
        return None
    if len(commands) > 1 and not commands[-1]:
        commands.pop()
    if any(not words or not _PLAIN.fullmatch(words[0]) or words[0] in _KEYWORDS for words in commands):
        return None
    return [tuple(words) for words in commands]


def prefixes(words: tuple[str, ...]) -> list[str]:
    """The beginnings of a command by which it may have been allowed, the shortest first; the last is what to offer.

    `git status -s` is offered as `git status`, `cat a.txt` as `cat`, `npm run test -- -x` as `npm run test`; what runs
    anything that it is told, such as `python`, has none.
    """
    program = re.sub(r"[\d.]+$", "", words[0].rpartition("/")[2])
    if program in _CARRIERS:
        return []
    if len(words) == 1:
        return [words[0]]
    if words[1].startswith("-") and program in ("git", "cargo", "npm", "go", "dotnet"):
        return []  # an option before the subcommand can run anything
    if not _SUBCOMMAND.fullmatch(words[1]) or "/" in words[0]:
        return [words[0]]
    count = 3 if words[1] in ("run", "exec") else 2
    known = [word for word in words[:count] if _PLAIN.fullmatch(word)]
    return [" ".join(known[:length]) for length in range(1, len(known) + 1)]
