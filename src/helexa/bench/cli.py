"""The `helexa-bench` command, also called `helexa bench`, and its subcommands.

The subcommands import what they need when they run, so that `--help` is fast.
"""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn

from cyclopts import App, Group, Parameter, validators

from helexa.core.command_line import VERSION_FLAGS, call, run_program
from helexa.core.version import version_line

if TYPE_CHECKING:
    from helexa.bench.sweep_and_warm_up import SweepReport


ConfigPath = Annotated[Path | None, Parameter(name=["--config", "-c"])]
LogFormat = Annotated[Literal["text", "json"], Parameter()]


def database(db: Path | None, config: Path | None) -> Path:
    """Return the database path: `db` if given, else the path in the configuration.

    Args:
        db: path from the command line, or None.
        config: path of the configuration file, or None to use the default locations.

    Raises:
        ConfigError: the configuration is invalid.
    """
    from helexa.bench.config import read_config

    return db or read_config(config).bench.db_path


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
    """Compare B with A; each is a build, `@target` or `build@target`.

    Exit code 5 if B regressed.

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
        raise HelexaError(f"no metric is called '{metric}'; use one of {', '.join(HOT)}")
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


def score(
    *,
    id: int,
    score: Annotated[float, Parameter(validator=validators.Number(gte=0, lte=1))],
    scorer: str = "manual",
    db: Path | None = None,
    config: ConfigPath = None,
) -> None:
    """Set the score of the response that is stored with a run.

    Args:
        id: The run.
        score: From 0 to 1.
        scorer: Name of the scorer; each scorer has one score per run.
        db: The database, instead of the configured database.
        config: The configuration file.
    """
    from helexa.bench.store.database import StoreError
    from helexa.bench.store.writer import Store

    path = database(db, config)
    if not path.exists():
        raise StoreError(f"{path} does not exist: nothing has been measured yet; run `helexa-bench once` first")
    with Store(path) as store:
        store.score(id, score, scorer)
    print(f"run {id}: {scorer} gives {score:g}")


def serve(
    *,
    config: ConfigPath = None,
    db: Path | None = None,
    listen: str | None = None,
    log_format: LogFormat = "text",
) -> None:
    """Serve the pages and the API; the database is only read.

    Args:
        config: The configuration file.
        db: The database, instead of the configured database.
        listen: Address, instead of the configured address.
        log_format: Text lines, or JSON objects.
    """
    from helexa.bench import app
    from helexa.bench.config import read_config
    from helexa.core import logs
    from helexa.core.address import Address, parse_address
    from helexa.core.errors import ConfigError, UsageError
    from helexa.http.process import run

    logs.configure(log_format)
    settings = read_config(config)
    if not settings.api.enabled:
        raise ConfigError("api.enabled is false, so there is nothing to serve; set api.enabled = true")
    try:
        address = settings.api.listen if listen is None else parse_address(listen)
    except ValueError as error:
        raise UsageError(f"--listen: {error}") from None
    assert isinstance(address, Address)
    run(app.serve(db or settings.bench.db_path, address, settings.api.root_path, settings.api.console_url))


def export(*, html: Path, db: Path | None = None, config: ConfigPath = None) -> None:
    """Write the pages as static files, for any web server or none.

    Args:
        html: The output folder; created if missing, and its files may be replaced.
        db: The database, instead of the configured database.
        config: The configuration file.
    """
    from helexa.bench.pages.page_routes_and_html_export import export as write
    from helexa.bench.results.archive import Archive

    with Archive(database(db, config)) as archive:
        pages = write(archive, html)
    print(f"{pages} pages; begin with {html / 'index.html'}")


def import_(source: Path, /, *, db: Path | None = None, config: ConfigPath = None) -> None:
    """Import the results of the first helexa-bench.

    Runs that were imported before are skipped.

    Args:
        source: The database of the first helexa-bench.
        db: The database to import into, instead of the configured database.
        config: The configuration file.
    """
    from helexa.bench.store.importer import import_runs
    from helexa.bench.store.writer import Store

    with Store(database(db, config)) as store:
        report = import_runs(store, source)
    print(f"{report.added} runs imported, {report.known} known already, {report.unreadable} unreadable")


def run(*, config: ConfigPath = None, log_format: LogFormat = "text") -> None:
    """Measure continuously, compare builds, and serve the results.

    Args:
        config: The configuration file.
        log_format: Text lines, or JSON objects.
    """
    import asyncio

    from helexa.bench import daemon
    from helexa.bench.config import find_config, load
    from helexa.core import logs

    logs.configure(log_format)
    path = find_config(config)
    asyncio.run(daemon.run(load(path), path))


def once(*, config: ConfigPath = None, log_format: LogFormat = "text") -> int:
    """Take all missing samples, once.

    Exit code 1 if a sample failed or a target did not answer, 5 if a metric regressed.

    Args:
        config: The configuration file.
        log_format: Text lines, or JSON objects.
    """
    import asyncio

    from helexa.bench import daemon
    from helexa.bench.alerts import EXIT_REGRESSED, AlertMonitor, payload
    from helexa.bench.config import read_config
    from helexa.bench.results.archive import Archive
    from helexa.bench.store.database import measuring
    from helexa.bench.store.writer import Store
    from helexa.core import logs

    logs.configure(log_format)
    settings = read_config(config)
    database = settings.bench.db_path
    with measuring(database), Store(database) as store, Archive(database) as archive:
        monitor = AlertMonitor(settings.alerts, store, archive, settings.bench.samples_per_version)
        report, review = asyncio.run(daemon.sweep_and_judge(settings, store, monitor))
    code = _exit_code(report)
    for alert in (*review.regressed, *review.improved):
        print(f"{alert.verdict}: {payload(alert)['text']}")
    return EXIT_REGRESSED if review.regressed else code


def swap_cost(*, config: ConfigPath = None, samples: int = 1, log_format: LogFormat = "text") -> int:
    """Measure unloading and loading of every loaded model of every neuron.

    Each model is unavailable during its measurement.

    Args:
        config: The configuration file.
        samples: Number of samples per model.
        log_format: Text lines, or JSON objects.
    """
    import asyncio

    from helexa.bench import daemon
    from helexa.bench.config import read_config
    from helexa.bench.store.database import measuring
    from helexa.bench.store.writer import Store
    from helexa.bench.sweep_and_warm_up import swap_scenario
    from helexa.core import logs

    logs.configure(log_format)
    settings = read_config(config)
    scenario = swap_scenario(settings.scenarios)
    with measuring(settings.bench.db_path), Store(settings.bench.db_path) as store:
        report = asyncio.run(
            daemon.sweep_once(
                settings, store, [scenario], lambda configuration: store.count(configuration).good + samples
            )
        )
    return _exit_code(report)


def _exit_code(report: "SweepReport") -> int:
    print(
        f"{report.measured} measured, {report.failed} failed, {report.skipped} configurations complete,"
        f" {len(report.unreachable)} targets unreachable"
    )
    return 1 if report.failed or report.unreachable else 0


def create_app(name: str) -> App:
    """Return the command line application with all subcommands.

    `name` is the command's name in help texts.
    """
    app = App(
        name=name,
        version=partial(version_line, "helexa-bench"),
        version_flags=VERSION_FLAGS,
        help="Measure every build of every node, compare the builds, and show the results.",
        result_action="return_value",
    )
    app.command(run, help="Measure continuously and serve the results.")
    app.command(once, help="Take all missing samples, then exit.")
    app.command(swap_cost, help="Measure unloading and loading of every loaded model.")
    app.command(serve, help="Serve the results without measuring.")
    app.command(report, help="Print results as tables or JSON.")
    app.command(compare, help="Compare two builds, targets or engines.")
    app.command(export, help="Write the pages as static files.")
    app.command(import_, name="import", help="Import the results of the first helexa-bench.")
    app.command(score, help="Set the score of a stored response.")
    return app


app = create_app("bench")
"""The application as `helexa bench`."""


def main() -> NoReturn:
    """Run the command line and exit.

    Exit codes: 0 success, 1 failure, 2 wrong usage, 5 regression, 78 wrong configuration.
    """
    run_program("helexa-bench", partial(call, create_app("helexa-bench")))
