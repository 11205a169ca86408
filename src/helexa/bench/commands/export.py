"""`helexa-bench export`."""

from pathlib import Path

from helexa.bench.commands.settings import ConfigPath, database


def export(*, html: Path, db: Path | None = None, config: ConfigPath = None) -> None:
    """Write the pages as files that any web server, or none, can show.

    Args:
        html: The folder to write to; it is made, and what is in it may be replaced.
        db: The database, instead of the configured one.
        config: The configuration file.
    """
    from helexa.bench.export import export as write
    from helexa.bench.results.archive import Archive

    with Archive(database(db, config)) as archive:
        pages = write(archive, html)
    print(f"{pages} pages; begin with {html / 'index.html'}")
