"""The `cortex` command."""

from functools import partial
from pathlib import Path
from typing import Annotated, Literal, NoReturn

from cyclopts import App, Parameter

from helexa.core.command_line import VERSION_FLAGS, call, run_program
from helexa.core.errors import ConfigError, UsageError
from helexa.core.version import version_line

app = App(
    name="cortex",
    help="The gateway: one address in front of any number of nodes.",
    version=partial(version_line, "cortex"),
    version_flags=VERSION_FLAGS,
)
keys = App(name="keys", help="Create, list and revoke keys, on the host of the ledger.")
app.command(keys)
keys.command("helexa.cortex.key_and_node_commands:create", name="create", help="Create a key and show its secret once.")
keys.command("helexa.cortex.key_and_node_commands:list_keys", name="list", help="List all keys without their secrets.")
keys.command("helexa.cortex.key_and_node_commands:revoke", name="revoke", help="Revoke a key permanently.")
nodes = App(name="nodes", help="Invite, list and remove nodes, on the host of the ledger.")
app.command(nodes)
nodes.command("helexa.cortex.key_and_node_commands:invite", name="invite", help="Create a token for a node to join.")
nodes.command("helexa.cortex.key_and_node_commands:list_nodes", name="list", help="List the nodes of this gateway.")
nodes.command("helexa.cortex.key_and_node_commands:remove", name="remove", help="Remove a node that joined.")
app.command("helexa.cortex.check_command:check", help="Check the configuration files and show what they serve.")
app.command(
    "helexa.cortex.fleet_commands:status", help="Show a running gateway's health and where its models are loaded."
)
app.command("helexa.cortex.fleet_commands:top", help="Show the newest requests, refreshed every second.")
app.command("helexa.cortex.fleet_commands:explain", help="Explain where a request for a model would be sent.")
app.command("helexa.cortex.fleet_commands:cordon", help="Send no new requests and loads to a node.")
app.command("helexa.cortex.fleet_commands:uncordon", help="Send requests and loads to a node again.")
app.command("helexa.cortex.fleet_commands:drain", help="Cordon a node and wait until its requests have ended.")


@app.command
def serve(
    *,
    config: Annotated[Path, Parameter(name=["--config", "-c"])] = Path("cortex.toml"),
    listen: str | None = None,
    metrics_listen: str | None = None,
    insecure: Annotated[bool, Parameter(negative="")] = False,
    log_format: Literal["text", "json"] = "text",
) -> None:
    """Run the gateway.

    Args:
        config: the configuration file.
        listen: address of the API, instead of the configured address.
        metrics_listen: address of the Prometheus metrics, instead of the configured address.
        insecure: allow listening on the network without required keys.
        log_format: text lines for people, or JSON objects.
    """
    from helexa.core import catalog, logs, tracing
    from helexa.core.address import parse_address
    from helexa.cortex import app
    from helexa.cortex.access.proxies_exposure_and_cors import check_exposure
    from helexa.cortex.config import load, log_unknown_variables
    from helexa.http.process import run

    logs.configure(log_format)
    tracing.configure("cortex")
    settings = load(config)
    log_unknown_variables(settings)
    for name, text in (("listen", listen), ("metrics_listen", metrics_listen)):
        if text is None:
            continue
        try:
            setattr(settings.gateway, name, parse_address(text))
        except ValueError as error:
            raise UsageError(f"--{name.replace('_', '-')}: {error}") from None
    settings.gateway.insecure |= insecure
    try:
        check_exposure(settings)
        models_catalog = catalog.load(settings.models_config)
        catalog.log_unknown_targets(models_catalog, settings.models_config)
        run(app.serve(settings, models_catalog, config))
    except ConfigError as error:
        named = str(config) in str(error) or str(settings.models_config) in str(error)
        raise error if named else ConfigError(f"{config}: {error}") from None
    finally:
        tracing.shut_down()


def main() -> NoReturn:
    """Run the `cortex` command.

    Exit codes: 0 success, 1 failure, 2 wrong usage, 3 gateway unreachable, 78 invalid configuration.
    """
    run_program("cortex", partial(call, app), tracebacks=True)


gateway = App(name="gateway", help=app.help, version=partial(version_line, "helexa"), version_flags=VERSION_FLAGS)
"""The commands of `cortex` as subcommands of `helexa gateway`."""
gateway.update(app)
