"""The subcommand `helexa-bench score`."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter, validators

from helexa.bench.commands.settings import ConfigPath, database


def score(
    *,
    id: int,
    score: Annotated[float, Parameter(validator=validators.Number(gte=0, lte=1))],
    scorer: str = "manual",
    db: Path | None = None,
    config: ConfigPath = None,
) -> None:
    """Set the score of a run's artifact, which is the model's response that is stored with the run.

    Args:
        id: The run.
        score: From 0 to 1.
        scorer: Name of the scorer; each scorer has one score per run.
        db: The database, instead of the configured database.
        config: The configuration file.
    """
    from helexa.bench.store.database import StoreError
    from helexa.bench.store.store import Store

    path = database(db, config)
    if not path.exists():
        raise StoreError(f"{path}: no such file; nothing has been measured yet")
    with Store(path) as store:
        store.score(id, score, scorer)
    print(f"run {id}: {scorer} gives {score:g}")
