"""`helexa-bench import`."""

from pathlib import Path

from helexa.bench.commands.settings import ConfigPath, database


def import_(source: Path, /, *, db: Path | None = None, config: ConfigPath = None) -> None:
    """Take over what the first helexa-bench has measured. What was imported before is not imported twice.

    Args:
        source: Its database.
        db: The database to import into, instead of the configured one.
        config: The configuration file.
    """
    from helexa.bench.store.importer import import_runs
    from helexa.bench.store.store import Store

    with Store(database(db, config)) as store:
        report = import_runs(store, source)
    print(f"{report.added} runs imported, {report.known} known already, {report.unreadable} unreadable")
