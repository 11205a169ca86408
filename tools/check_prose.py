#!/usr/bin/env python3
"""Check names and prose: first docstring lines, spelling, private words, log lines, and the files that texts name.

Exits with 1 and one line per finding if a rule is broken. `make lint` runs it.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.machinery import PathFinder
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FIRST_LINE = 80

# American spelling in names and prose; `dialogue`, `license` and `practise` are no findings.
BRITISH = re.compile(
    r"(?:quanti|tokeni|normali|seriali|initiali|optimi|summari|organi|recogni|authori|categori|prioriti|minimi|maximi"
    r"|synchroni|speciali|generali|finali|materiali|reali|utili|visuali|customi|emphasi|randomi|vectori|paralleli)s(?=e|ed|er|es|ing|ation)"
    r"|colour|behaviour|favour|honour|neighbour|flavour|labour|centre(?!d)|metre\b|licence|defence|offence"
    r"|modell(?=ed|ing)|labell(?=ed|ing)|travell|signall(?=ed|ing)|catalogu(?!e\b)|analys(?=ed\b|ing\b)",
    re.IGNORECASE,
)
# Public names of other programs, names in prompts of stored results, and a former name in the JSON of `helexa show`.
SPELLED_OUTSIDE = re.compile(r"(?i)summarise_|catalogue|emphasis\b|synchronise|colours|\"licence\"")

# Words that only helexa's first developers understood, with the words to use.
PRIVATE = {
    "foresees": "expects",
    "overthought": "thought for too long",
    "tabled": "listed",
    "wary": "careful",
    "whoever": "the client (or caller, node)",
    "somebody": "a client (or caller, user)",
}
PRIVATE_WORDS = re.compile(r"\b(" + "|".join(PRIVATE) + r")\b", re.IGNORECASE)

NAMED_PATH = re.compile(r"`((?:src|tests|perf|docs|outside|deploy|examples)/[\w./-]*\w)`")
NAMED_SOURCE = re.compile(r"`((?:\w+/)+\w+\.(?:py|[ch]))`")
SOURCES = (ROOT, *filter(Path.is_dir, [ROOT / "src" / "helexa", *(ROOT / "src" / "helexa").rglob("[!_]*")]))
NAMED_FILE = re.compile(r"`((?:\w+/)*\w+\.(?:py|[ch]))`")
# Files of other projects, and paths in examples, which comments of the code name.
FILES_OUTSIDE = re.compile(r"(?:torch|integrations|conversion)/|src/(?:app|new)\.py")
NAMED_IN_FILE = re.compile(r"`([A-Za-z_]\w*)` in `((?:\w+/)+\w+\.(?:py|[ch]))`")
# A log line: one clause, fields, advice. "%s" stands for a complete text, for example one that commands print, too.
LOG_CLAUSE = re.compile(r"(?:[a-z]|[A-Z]{2})[^%=:;]*[^%=:;., ]")
LOG_LINE = re.compile(rf"(?!.*\.$)(?:%s|{LOG_CLAUSE.pattern}(?: [a-z][a-z0-9_]*=\S+)*(?:; .+)?)")
LOGGER = re.compile(r"(?i)(?:^|[._])log(?:ger)?$|getLogger\(.*\)$")
LOG_CALLS = frozenset({"debug", "info", "warning", "error", "exception", "critical", "log"})
NAMED_MODULE = re.compile(r"`(helexa(?:\.[a-z_0-9]+)+)`")


def tracked(*patterns: str) -> list[Path]:
    """Return the tracked files that match `patterns` of git."""
    listed = subprocess.run(["git", "ls-files", "-z", "--", *patterns], cwd=ROOT, capture_output=True, check=True)
    return [path for name in listed.stdout.decode().split("\0") if name and (path := ROOT / name).is_file()]


def long_first_lines(module: ast.Module, name: str) -> Iterator[str]:
    """Yield a finding for each docstring of `module` whose first line is too long."""
    for node in ast.walk(module):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = (ast.get_docstring(node) or "").partition("\n")[0]
            if len(first) > FIRST_LINE:
                yield f"{name}:{node.body[0].lineno}: the first docstring line has {len(first)} characters"


def log_lines(module: ast.Module, name: str) -> Iterator[str]:
    """Yield a finding for each log call in `module` with another message than a clause, fields and advice."""
    for node in ast.walk(module):
        match node:
            case ast.Call(ast.Name("tell") | ast.Attribute(ast.Name("logs"), "tell"), [_, _, message]):
                pattern = LOG_CLAUSE
            case ast.Call(ast.Attribute(logger, method), args) if method in LOG_CALLS:
                if not LOGGER.search(ast.unparse(logger)):
                    continue
                message, pattern = args[method == "log"], LOG_LINE
            case _:
                continue
        for text in (message.body, message.orelse) if isinstance(message, ast.IfExp) else (message,):
            if not isinstance(text, ast.Constant):
                yield f"{name}:{node.lineno}: the message of a log line is not a constant"
            elif not pattern.fullmatch(text.value):
                yield f"{name}:{node.lineno}: {text.value!r}: write one clause, then key=value, then '; ' and advice"


def words(path: Path, name: str) -> Iterator[str]:
    """Yield a finding for each British spelling and each private word in the file at `path`.

    The code blocks of pages are not checked: they quote prompts and other programs.
    """
    in_block = False
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if path.suffix == ".md" and line.lstrip().startswith("```"):
            in_block = not in_block
        if in_block:
            continue
        for match in BRITISH.finditer(line):
            if not SPELLED_OUTSIDE.search(line):
                yield f"{name}:{number}: {match[0]!r}: use American spelling"
        for match in PRIVATE_WORDS.finditer(line):
            yield f"{name}:{number}: {match[0]!r}: write {PRIVATE[match[0].lower()]!r}"


def missing_names(path: Path, name: str) -> Iterator[str]:
    """Yield a finding for each file and module that the page at `path` names and that does not exist."""
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        for match in NAMED_PATH.finditer(line):
            if not (ROOT / match[1]).exists():
                yield f"{name}:{number}: the file {match[1]} does not exist"
        for match in NAMED_SOURCE.finditer(line):
            if not any((folder / match[1]).exists() for folder in SOURCES):
                yield f"{name}:{number}: the file {match[1]} does not exist"
        for match in NAMED_IN_FILE.finditer(line):
            files = [file for folder in SOURCES if (file := folder / match[2]).exists()]
            if files and not any(re.search(rf"\b{match[1]}\b", file.read_text(encoding="utf-8")) for file in files):
                yield f"{name}:{number}: {match[2]} does not contain {match[1]}"
        for match in NAMED_MODULE.finditer(line):
            if not is_module_or_name(match[1]):
                yield f"{name}:{number}: the module {match[1]} does not exist"


def missing_files(path: Path, name: str, known: frozenset[str]) -> Iterator[str]:
    """Yield a finding for each file that the code at `path` names in backticks and that is not in `known`.

    `known` are all tracked files, each with every end of its path.
    """
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        for match in NAMED_FILE.finditer(line):
            if match[1] not in known and not FILES_OUTSIDE.match(match[1]):
                yield f"{name}:{number}: the file {match[1]} does not exist"


def is_module_or_name(dotted: str) -> bool:
    """Return whether `dotted` is a module of src or a name that a module's text contains, for example a logger."""
    folder, module = [str(ROOT / "src")], ROOT / "src"
    for part in dotted.split("."):
        spec = PathFinder.find_spec(part, folder)
        if spec is None:
            file = module / "__init__.py" if module.is_dir() else module.with_suffix(".py")
            return file.is_file() and re.search(rf"\b{part}\b", file.read_text(encoding="utf-8")) is not None
        folder, module = list(spec.submodule_search_locations or []), module / part
    return True


def main() -> int:
    """Print the findings and return the exit status."""
    findings: list[str] = []
    paths = [path.relative_to(ROOT).parts for path in tracked("*.py", "*.[ch]")]
    known = frozenset("/".join(parts[start:]) for parts in paths for start in range(len(parts)))
    for path in tracked("src/*.[ch]", "src/*.py", "tests/*.py", "perf/*.py", "outside/*.py", "*.md", "docs/*.toml"):
        name = str(path.relative_to(ROOT))
        if path.suffix == ".py" and name.startswith("src/"):
            module = ast.parse(path.read_text(encoding="utf-8"))
            findings += [*long_first_lines(module, name), *log_lines(module, name)]
        if path.suffix != ".md" and name.startswith("src/"):
            findings += missing_files(path, name, known)
        if path.suffix == ".md" and name != "CHANGELOG.md":
            findings += missing_names(path, name)
        if name != "CHANGELOG.md":
            findings += words(path, name)
    print("\n".join(findings) if findings else "prose: no findings")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
