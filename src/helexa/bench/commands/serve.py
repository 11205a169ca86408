"""The subcommand `helexa-bench serve`, which serves results without taking measurements."""

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from helexa.bench.commands.settings import ConfigPath, read_config


def serve(
    *,
    config: ConfigPath = None,
    db: Path | None = None,
    listen: str | None = None,
    log_format: Annotated[Literal["text", "json"], Parameter()] = "text",
) -> None:
    """Serve the pages and the API; the database is only read.

    Args:
        config: The configuration file.
        db: The database, instead of the configured database.
        listen: Address, instead of the configured address.
        log_format: Text lines, or JSON objects.
    """
    from helexa.bench import server
    from helexa.core import logs
    from helexa.core.address import Address, parse_address
    from helexa.core.errors import ConfigError, UsageError
    from helexa.http.loop import run

    logs.configure(log_format)
    settings = read_config(config)
    if not settings.api.enabled:
        raise ConfigError("api.enabled is false: there is nothing to serve")
    try:
        address = settings.api.listen if listen is None else parse_address(listen)
    except ValueError as error:
        raise UsageError(f"--listen: {error}") from None
    assert isinstance(address, Address)
    run(server.serve(db or settings.bench.db_path, address, settings.api.root_path, settings.api.console_url))
