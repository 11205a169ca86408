"""Finds and reads the configuration file and the database path for all subcommands."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

if TYPE_CHECKING:
    from helexa.bench.config import BenchConfig

ConfigPath = Annotated[Path | None, Parameter(name=["--config", "-c"])]

_PLACES = (Path("helexa-bench.toml"), Path("/etc/helexa-bench/helexa-bench.toml"))


def find_config(path: Path | None) -> Path | None:
    """Return the path of the configuration file, or None if there is no file.

    The result is `path` if given. Otherwise, the result is `./helexa-bench.toml` if it exists, or else the system-wide
    file if it exists.
    """
    return path or next((place for place in _PLACES if place.exists()), None)


def read_config(path: Path | None) -> "BenchConfig":
    """Return the configuration from the file that `find_config` selects, or the default configuration without a file.

    Raises:
        ConfigError: the configuration is invalid. The message is one line.
    """
    from helexa.bench.config import load

    return load(find_config(path))


def database(db: Path | None, config: Path | None) -> Path:
    """Return the path of the database: `db` if given, else the path from the configuration file.

    Args:
        db: path from the command line, or None.
        config: path of the configuration file, or None to use the default locations.

    Raises:
        ConfigError: the configuration is invalid.
    """
    return db or read_config(config).bench.db_path
