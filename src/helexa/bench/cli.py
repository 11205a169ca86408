"""The `helexa-bench` command, also available as `helexa bench`.

Subcommands are imported when they run, so that `--help` is fast.
"""

from functools import partial
from typing import NoReturn

from cyclopts import App

from helexa.core.command_line import VERSION_FLAGS, call, run_program
from helexa.core.version import version_line

_COMMANDS = "helexa.bench.commands"


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
    app.command(f"{_COMMANDS}:run", help="Measure continuously and serve the results.")
    app.command(f"{_COMMANDS}:once", help="Take all missing samples, then exit.")
    app.command(f"{_COMMANDS}:swap_cost", help="Measure unloading and loading of every loaded model.")
    app.command(f"{_COMMANDS}:serve", help="Serve the results without measuring.")
    app.command(f"{_COMMANDS}:report", help="Print results as tables or JSON.")
    app.command(f"{_COMMANDS}:compare", help="Compare two builds, targets or engines.")
    app.command(f"{_COMMANDS}:export", help="Write the pages as static files.")
    app.command(f"{_COMMANDS}:import_", name="import", help="Import the results of the first helexa-bench.")
    app.command(f"{_COMMANDS}:score", help="Set the score of a stored response.")
    return app


app = create_app("bench")
"""The application as `helexa bench`."""


def main() -> NoReturn:
    """Run the command line and exit.

    Exit codes: 0 success, 1 failure, 2 wrong usage, 5 regression, 78 config.
    """
    run_program("helexa-bench", partial(call, create_app("helexa-bench")))
