"""The subcommand `helexa-bench export`."""

from pathlib import Path

from helexa.bench.commands.settings import ConfigPath, database


def export(*, html: Path, db: Path | None = None, config: ConfigPath = None) -> None:
    """Write the pages as static files, which browsers can show with or without a web server.

    Args:
        html: The output folder; created if missing, and its files may be replaced.
        db: The database, instead of the configured database.
        config: The configuration file.
    """
    from helexa.bench.export import export as write
    from helexa.bench.results.archive import Archive

    with Archive(database(db, config)) as archive:
        pages = write(archive, html)
    print(f"{pages} pages; begin with {html / 'index.html'}")
