"""How the verbs find their configuration and their database."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

ConfigPath = Annotated[Path | None, Parameter(name=["--config", "-c"])]

_PLACES = (Path("helexa-bench.toml"), Path("/etc/helexa-bench/helexa-bench.toml"))


def find_config(path: Path | None) -> Path | None:
    """`path`; without one, the first file that exists of ./helexa-bench.toml and the system's; else None."""
    return path or next((place for place in _PLACES if place.exists()), None)


def database(db: Path | None, config: Path | None) -> Path:
    """The database that was named, or else the configured one.

    Raises:
        ConfigError: the configuration is wrong.
    """
    from helexa.bench.config import load

    return db or load(find_config(config)).bench.db_path
