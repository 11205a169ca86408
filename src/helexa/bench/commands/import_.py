"""The subcommand `helexa-bench import`."""

from pathlib import Path

from helexa.bench.commands.settings import ConfigPath, database


def import_(source: Path, /, *, db: Path | None = None, config: ConfigPath = None) -> None:
    """Import the results of the first helexa-bench. Runs that were imported before are skipped.

    Args:
        source: The database of the first helexa-bench.
        db: The database to import into, instead of the configured database.
        config: The configuration file.
    """
    from helexa.bench.store.importer import import_runs
    from helexa.bench.store.store import Store

    with Store(database(db, config)) as store:
        report = import_runs(store, source)
    print(f"{report.added} runs imported, {report.known} known already, {report.unreadable} unreadable")
