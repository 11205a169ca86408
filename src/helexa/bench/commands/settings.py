"""Paths of the configuration file and the database for all subcommands."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

if TYPE_CHECKING:
    from helexa.bench.config import BenchConfig

ConfigPath = Annotated[Path | None, Parameter(name=["--config", "-c"])]

_PLACES = (Path("helexa-bench.toml"), Path("/etc/helexa-bench/helexa-bench.toml"))


def find_config(path: Path | None) -> Path | None:
    """Return `path`, else the first existing file of ./helexa-bench.toml and the system's file, else None."""
    return path or next((place for place in _PLACES if place.exists()), None)


def read_config(path: Path | None) -> "BenchConfig":
    """Return the configuration at `path`, at a default path, or the default configuration.

    Raises:
        ConfigError: the configuration is invalid; the message is one line.
    """
    from helexa.bench.config import load

    return load(find_config(path))


def database(db: Path | None, config: Path | None) -> Path:
    """Return `db`, else the configured database.

    Raises:
        ConfigError: the configuration is invalid.
    """
    return db or read_config(config).bench.db_path
