"""The subcommand `helexa-bench report`."""

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Group, Parameter, validators

from helexa.bench.commands.settings import ConfigPath, database

_KIND = Group("What to report (default: the newest build of everything)", validator=validators.MutuallyExclusive())
_Flag = Annotated[bool, Parameter(group=_KIND, negative=())]


def report(
    *,
    scaling: _Flag = False,
    swap: _Flag = False,
    capability: _Flag = False,
    concurrency: _Flag = False,
    format: Literal["md", "json"] = "md",
    db: Path | None = None,
    config: ConfigPath = None,
) -> None:
    """Print results.

    Args:
        scaling: Rates by context length.
        swap: Durations of loading models.
        capability: Scores of probes.
        concurrency: Latency and throughput by load.
        format: Tables, or JSON.
        db: The database, instead of the configured database.
        config: The configuration file.
    """
    import orjson

    from helexa.bench import report as reports
    from helexa.bench.results.archive import Archive

    chosen = {"scaling": scaling, "swap": swap, "capability": capability, "concurrency": concurrency}
    kind = next((name for name, wanted in chosen.items() if wanted), "summary")
    with Archive(database(db, config)) as archive:
        results = reports.FINDERS[kind](archive)
    if format == "json":
        print(orjson.dumps(results, option=orjson.OPT_INDENT_2).decode())
    else:
        print(reports.WRITERS[kind](results))
