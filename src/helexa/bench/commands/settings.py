"""How the verbs find their configuration and their database."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from helexa.bench.config import BenchConfig, load

ConfigPath = Annotated[Path | None, Parameter(name=["--config", "-c"])]

_PLACES = (Path("helexa-bench.toml"), Path("/etc/helexa-bench/helexa-bench.toml"))


def read_config(path: Path | None) -> BenchConfig:
    """The configuration at `path`; without one, of the first file that exists of ./helexa-bench.toml and the system's,
    or the defaults.

    Raises:
        ConfigError: one line naming what is wrong.
    """
    return load(path or next((place for place in _PLACES if place.exists()), None))


def database(db: Path | None, config: Path | None) -> Path:
    """The database that was named, or else the configured one.

    Raises:
        ConfigError: the configuration is wrong.
    """
    return db or read_config(config).bench.db_path
