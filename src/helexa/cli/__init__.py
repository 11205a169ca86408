"""The `helexa` command.

Each subcommand has a module, which is imported when the subcommand is used.
"""

from functools import partial
from typing import NoReturn

from cyclopts import App, UnknownOptionError

from helexa.cli.misspellings import usage_message
from helexa.cli.terminal_output_and_errors import exit_code
from helexa.core.command_line import VERSION_FLAGS, call, run_program
from helexa.core.version import version_line
from helexa.neuron.engine_flags import complete_flags

app = App(
    name="helexa",
    version=partial(version_line, "helexa"),
    version_flags=VERSION_FLAGS,
    help="Serve open-weight models on hardware you own, and talk to them.",
    help_epilogue="Start with 'helexa run', which offers a model, or with 'helexa serve' for a gateway that other "
    "clients can use. "
    "With --debug, a failing command shows a traceback.",
    result_action="return_value",
)
app.command(
    "helexa.cli.commands.up_and_stop:up", name=["serve", "up"], help="Start one neuron and one cortex on this machine."
)
app.command("helexa.cortex.cli:gateway", name="gateway", help="Run and manage a gateway, like cortex.")
app.command("helexa.neuron.cli:node", name="node", help="Run and check a node, like neuron.")
app.command("helexa.cli.commands.generate:generate", help="Answer a prompt or a file of prompts.")
app.command("helexa.cli.commands.chat_and_run:run", help="Chat with a model, downloaded if missing.")
app.command("helexa.cli.commands.chat_and_run:chat", help="Chat with a model, or get one answer.")
app.command("helexa.cli.commands.list_show_and_pull:pull", help="Download models to this machine, or update them.")
app.command(
    "helexa.cli.commands.list_show_and_pull:list_models",
    name=["list", "ls"],
    help="List the models downloaded to this machine.",
)
app.command("helexa.cli.commands.cache:cache", help="List or delete saved prompts and packed weights of this machine.")
app.command("helexa.cli.commands.list_show_and_pull:models", help="List models to run, by the memory that they need.")
app.command("helexa.cli.commands.list_show_and_pull:show", help="Show the properties of a model from its files.")
app.command("helexa.cli.commands.rm:rm", help="Remove models from this machine.")
app.command("helexa.cli.commands.ps_and_status:ps", help="List the models of the fleet and how busy they are.")
app.command("helexa.cli.commands.load_and_unload:load", help="Load models on a running gateway.")
app.command("helexa.cli.commands.load_and_unload:unload", help="Unload models from a running gateway.")
app.command("helexa.cli.commands.up_and_stop:stop", help="Stop the helexa up of this machine, or unload a model.")
app.command("helexa.cli.commands.logs:logs", help="Print the logs of helexa up on this machine.")
app.command("helexa.bench.cli:app", name="bench", help="Measure every build of every node, and show the results.")
app.command("helexa.cli.commands.ps_and_status:status", help="Show the state of the gateway and its nodes.")
app.command(
    "helexa.cli.commands.console:console", help="Print a link that signs a browser on this machine in to the console."
)
app.command("helexa.cli.commands.doctor_and_smoke:smoke", help="Check a running gateway or node after a deployment.")
app.command("helexa.cli.commands.config:app", name="config", help="Show the configuration of a node or a gateway.")
app.command("helexa.acp.cli:serve", name="acp", help="Run the coding agent for an editor, on stdin and stdout.")
app.command(
    "helexa.cli.commands.doctor_and_smoke:doctor",
    help="Report the hardware and software, and the device that models run on.",
)
app.command("helexa.cli.flags_and_completion:completion", help="Print a shell's completion script.")


@app.command(name="help")
def show_help(*command: str) -> None:
    """Show the help of all commands, or of one command, as in helexa help run.

    Args:
        command: The words of the command.
    """
    _run([*command, "--help"])


@app.command(name="version")
def show_version() -> None:
    """Print the version, like helexa --version."""
    print(version_line("helexa"))


def main() -> NoReturn:
    """Run the command line.

    Exit codes: 0 success, 1 failure, 2 wrong usage, 3 gateway unreachable, 4 model not found, 78 wrong configuration,
    130 interrupted.
    """
    run_program("helexa", _run, usage_message=usage_message, exit_code=exit_code)


def _run(tokens: list[str]) -> int | None:
    if tokens in ([], ["--help"], ["-h"]):
        app.help_format = "plaintext"  # The list has no Markdown, and the Markdown renderer imports 80 modules.
    if tokens[:1] in (["serve"], ["up"], ["node"]):
        tokens = complete_flags(tokens)
    try:
        return call(app, tokens)
    except UnknownOptionError as error:
        if error.token.value != "-":
            raise
    # `-` means stdin in many programs. The commands read piped stdin anyway, so the argument `-` can be removed.
    return call(app, [word for place, word in enumerate(tokens) if word != "-" or tokens[place - 1] == "--prompts"])
