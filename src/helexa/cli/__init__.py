"""The `helexa` command. Each subcommand has a module, which is imported when the subcommand is used."""

import contextlib
import io
import os
import sys
from functools import partial
from typing import NoReturn

from cyclopts import App, CycloptsError, UnknownOptionError

from helexa.cli.failure import exit_code
from helexa.cli.terminal import printable
from helexa.core.errors import HelexaError
from helexa.core.extras import missing_extra
from helexa.core.version import version_line

app = App(
    name="helexa",
    version=partial(version_line, "helexa"),
    help="Serve open-weight models on hardware you own, and talk to them.",
    help_epilogue="Start with 'helexa chat', or with 'helexa serve' for a gateway that other clients can use. "
    "With --debug, a failing command shows a traceback.",
    result_action="return_value",
)
app.command("helexa.cli.commands.up:up", name=["serve", "up"], help="Start one neuron and one cortex on this machine.")
app.command("helexa.cli.server_apps:gateway", name="gateway", help="Run and manage a gateway, like `cortex`.")
app.command("helexa.cli.server_apps:node", name="node", help="Run and check a node, like `neuron`.")
app.command("helexa.cli.commands.generate:generate", help="Answer a prompt or a file of prompts.")
app.command("helexa.cli.commands.run:run", help="Chat with a given model, downloaded if missing.")
app.command("helexa.cli.commands.chat:chat", help="Chat with a model, or get one answer.")
app.command("helexa.cli.commands.pull:pull", help="Download models to this machine, or update them.")
app.command(
    "helexa.cli.commands.list:list_models", name=["list", "ls"], help="List the models downloaded to this machine."
)
app.command("helexa.cli.commands.show:show", help="Show the properties of a model from its files.")
app.command("helexa.cli.commands.rm:rm", help="Remove models from this machine.")
app.command("helexa.cli.commands.ps:ps", help="List the models of the fleet and how busy they are.")
app.command("helexa.bench.cli:app", name="bench", help="Measure every build of every node, and show the results.")
app.command("helexa.cli.commands.status:status", help="Show the state of the gateway and its nodes.")
app.command("helexa.cli.commands.smoke:smoke", help="Check a running gateway or node after a deployment.")
app.command("helexa.cli.commands.config:app", name="config", help="Show the configuration of a node or a gateway.")
app.command("helexa.acp.cli:serve", name="acp", help="Run the coding agent for an editor, on stdin and stdout.")
app.command(
    "helexa.cli.commands.doctor:doctor", help="Report the hardware and software, and the device that models run on."
)
app.command("helexa.cli.commands.completion:completion", help="Print a shell's completion script.")


def main() -> NoReturn:
    """Run the command line.

    Exit codes: 0 success, 1 failure, 2 wrong usage, 3 gateway unreachable, 4 model not found, 78 wrong configuration,
    130 interrupted.
    """
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    tokens, debug = _without_debug(sys.argv[1:])
    try:
        code = _run(tokens) or 0
        sys.stdout.flush()
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:
        # The reader closed the pipe, as in `helexa ps | head -1`: discard further output, including the flush at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    except Exception as error:
        if debug:
            raise
        code = _explain(error)
    sys.exit(code)


def _run(tokens: list[str]) -> int | None:
    try:
        return app(tokens, exit_on_error=False, print_error=False)
    except UnknownOptionError as error:
        if error.token.value != "-":
            raise
    # Stdin is read in any case, so a `-` argument for stdin can be removed.
    remaining_tokens = [word for place, word in enumerate(tokens) if word != "-" or tokens[place - 1] == "--prompts"]
    return app(remaining_tokens, exit_on_error=False, print_error=False)


def _without_debug(arguments: list[str]) -> tuple[list[str], bool]:
    end = arguments.index("--") if "--" in arguments else len(arguments)
    remaining = [argument for argument in arguments[:end] if argument != "--debug"]
    return remaining + arguments[end:], len(remaining) < end


def _explain(error: Exception) -> int:
    match error:
        case CycloptsError():
            text, code = f"{error} See helexa --help.", 2
        case HelexaError():
            text, code = str(error), exit_code(error)
        case ImportError() if lack := missing_extra(error):
            text, code = lack, 1
        case OSError():
            text, code = str(error), 1
        case _:
            text, code = f"internal error: {type(error).__name__}: {error} (--debug shows where)", 1
    with contextlib.suppress(OSError):
        print(f"helexa: {printable(' '.join(text.split()))}", file=sys.stderr)
    return code
