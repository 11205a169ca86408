"""The `helexa-bench` command, also available as `helexa bench`.

Each subcommand is a module, which is imported when the subcommand is first used.
"""

import os
import sys
from functools import partial
from typing import NoReturn

from cyclopts import App

from helexa.core.errors import HelexaError
from helexa.core.extras import missing_extra
from helexa.core.version import version_line

_VERBS = "helexa.bench.commands"


def create_app(name: str) -> App:
    """Return the command line application with all subcommands. `name` is the command's name in help texts."""
    app = App(
        name=name,
        version=partial(version_line, "helexa-bench"),
        help="Measure every build of every node, remember it, judge it and show it.",
        result_action="return_value",
    )
    app.command(f"{_VERBS}.run:run", help="Measure for ever, and show the results meanwhile.")
    app.command(f"{_VERBS}.run:once", help="Measure what is lacking, once.")
    app.command(f"{_VERBS}.run:swap_cost", help="Unload and load every warm model, and time that.")
    app.command(f"{_VERBS}.serve:serve", help="Show the results.")
    app.command(f"{_VERBS}.report:report", help="Print results as tables or JSON.")
    app.command(f"{_VERBS}.compare:compare", help="Compare two builds, targets or engines.")
    app.command(f"{_VERBS}.export:export", help="Write the pages as files.")
    app.command(f"{_VERBS}.import_:import_", name="import", help="Take over what the first helexa-bench measured.")
    app.command(f"{_VERBS}.score:score", help="Say what a run's artifact is worth.")
    return app


app = create_app("bench")
"""The application as `helexa bench`."""


def main() -> NoReturn:
    """Run the command line and exit. Exit codes: 0 success, 1 failure, 2 wrong usage, 5 regression, 78 config."""
    try:
        code = create_app("helexa-bench")() or 0
        sys.stdout.flush()
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:  # the reader closed the pipe, as in `helexa-bench report | head`: discard further output
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    except HelexaError as error:
        print(f"helexa-bench: {error}", file=sys.stderr)
        code = error.exit_code
    except ImportError as error:
        if (lack := missing_extra(error)) is None:
            raise
        print(f"helexa-bench: {lack}", file=sys.stderr)
        code = 1
    sys.exit(code)
