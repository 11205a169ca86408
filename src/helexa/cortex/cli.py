"""The `cortex` command."""

import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import App, Parameter

from helexa.core.errors import ConfigError, HelexaError, UsageError
from helexa.core.version import version_line
from helexa.cortex.commands.api_client import GatewayApi

app = App(
    name="cortex",
    help="The gateway: one address in front of any number of nodes.",
    version=partial(version_line, "cortex"),
)
keys = App(name="keys", help="Create, list and revoke keys, on the host of the ledger.")
app.command(keys)
keys.command("helexa.cortex.commands.key_commands:create", name="create", help="Create a key and show its secret once.")
keys.command("helexa.cortex.commands.key_commands:list_keys", name="list", help="List all keys without their secrets.")
keys.command("helexa.cortex.commands.key_commands:revoke", name="revoke", help="Revoke a key permanently.")
app.command("helexa.cortex.commands.check:check", help="Check the configuration files and show what they serve.")
app.command("helexa.cortex.commands.top:top", help="Show the newest requests, refreshed every second.")
app.command("helexa.cortex.commands.fleet_commands:explain", help="Explain where a request for a model would be sent.")
app.command("helexa.cortex.commands.fleet_commands:cordon", help="Send no new requests and loads to a node.")
app.command("helexa.cortex.commands.fleet_commands:uncordon", help="Send requests and loads to a node again.")
app.command("helexa.cortex.commands.fleet_commands:drain", help="Cordon a node and wait until its requests have ended.")

_ID_COLUMNS = 40
_DEFAULT_API = GatewayApi()


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
    from helexa.core import catalogue, logs, tracing
    from helexa.core.address import parse_address
    from helexa.cortex import server
    from helexa.cortex.access.exposure import check_exposure
    from helexa.cortex.config import load, log_unknown_variables
    from helexa.http.loop import run

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
        run(server.serve(settings, catalogue.load(settings.models_config), config))
    except ConfigError as error:
        named = str(config) in str(error) or str(settings.models_config) in str(error)
        raise error if named else ConfigError(f"{config}: {error}") from None
    finally:
        tracing.shut_down()


@app.command
def status(
    *, api: GatewayApi = _DEFAULT_API, as_json: Annotated[bool, Parameter(name="--json", negative="")] = False
) -> None:
    """Show a running gateway's health and where its models are loaded.

    Args:
        as_json: print JSON for programs.
    """
    import json

    health, models = api.get("/health"), api.get("/v1/models")
    try:
        lines = [_model_line(model) for model in models["data"]]
    except (KeyError, TypeError):
        raise HelexaError(f"{api.endpoint} is not a helexa gateway: unexpected response") from None
    if as_json:
        print(json.dumps({"health": health, "models": models["data"]}, indent=2))
    else:
        print(json.dumps(health, indent=2), *lines, sep="\n")


def main() -> None:
    """Run the `cortex` command. Exit codes: 0 success, 1 failure, 2 wrong usage, 3 unreachable, 78 configuration."""
    try:
        app()
    except HelexaError as error:
        print(f"cortex: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


def _model_line(model: dict[str, Any]) -> str:
    locations = ", ".join(f"{location['node']}({location['status']})" for location in model["locations"])
    return f"{model['id']:<{_ID_COLUMNS}} {locations}".rstrip()
