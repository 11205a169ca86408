"""The subcommand `helexa-bench compare`."""

from pathlib import Path
from typing import Literal

from helexa.bench.commands.settings import ConfigPath, database


def compare(
    a: str,
    b: str,
    /,
    *,
    model: str | None = None,
    metric: str | None = None,
    format: Literal["md", "json"] = "md",
    db: Path | None = None,
    config: ConfigPath = None,
) -> int:
    """Compare B with A; each is a build, `@target` or `build@target`. Exit code 5 if B regressed.

    Args:
        a: The baseline.
        b: The side to judge.
        model: Only this model.
        metric: Only this metric, by its name in the API.
        format: A table, or JSON.
        db: The database, instead of the configured database.
        config: The configuration file.
    """
    import orjson

    from helexa.bench import report
    from helexa.bench.alerts import EXIT_REGRESSED
    from helexa.bench.results.archive import Archive
    from helexa.bench.results.comparison import COMPARED, Side
    from helexa.bench.results.comparison import compare as find
    from helexa.bench.results.series import HOT
    from helexa.core.errors import HelexaError

    if metric is not None and metric not in HOT:
        raise HelexaError(f"no metric is called '{metric}'; there are {', '.join(HOT)}")
    with Archive(database(db, config)) as archive:
        try:
            sides = Side.parse(a), Side.parse(b)
            compared = find(archive, *sides, model=model, metrics=(metric,) if metric else COMPARED)
        except LookupError as error:
            raise HelexaError(error.args[0]) from None
    print(
        orjson.dumps(compared, option=orjson.OPT_INDENT_2).decode() if format == "json" else report.comparison(compared)
    )
    return EXIT_REGRESSED if any(row.state == "regressed" for row in compared) else 0
