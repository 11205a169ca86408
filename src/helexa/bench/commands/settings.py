"""How the verbs find their configuration and their database."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

if TYPE_CHECKING:
    from helexa.bench.config import BenchConfig

ConfigPath = Annotated[Path | None, Parameter(name=["--config", "-c"])]

_PLACES = (Path("helexa-bench.toml"), Path("/etc/helexa-bench/helexa-bench.toml"))


def find_config(path: Path | None) -> Path | None:
    """`path`; without one, the first file that exists of ./helexa-bench.toml and the system's; else None."""
    return path or next((place for place in _PLACES if place.exists()), None)


def read_config(path: Path | None) -> "BenchConfig":
    """The configuration at `path`, or where it is usually found, or the defaults.

    Raises:
        ConfigError: one line naming what is wrong.
    """
    from helexa.bench.config import load

    return load(find_config(path))


def database(db: Path | None, config: Path | None) -> Path:
    """The database that was named, or else the configured one.

    Raises:
        ConfigError: the configuration is wrong.
    """
    return db or read_config(config).bench.db_path
