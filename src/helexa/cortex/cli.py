"""The `cortex` command."""

import sys
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter

from helexa import __version__
from helexa.core.errors import HelexaError

app = App(name="cortex", help="The gateway: one address in front of any number of nodes.", version=__version__)

EXIT_FAILED = 1
EXIT_UNREACHABLE = 3
_STATUS_TIMEOUT_SECS = 10
_ID_COLUMNS = 40


@app.command
def serve(
    *,
    config: Annotated[Path, Parameter(name=["--config", "-c"])] = Path("cortex.toml"),
    listen: str | None = None,
    metrics_listen: str | None = None,
) -> None:
    """Run the gateway.

    Args:
        config: the configuration file.
        listen: address of the API, instead of the configured one.
        metrics_listen: address of the Prometheus text, instead of the configured one.
    """
    import logging

    from helexa.core import catalogue
    from helexa.core.errors import ConfigError
    from helexa.cortex import server
    from helexa.cortex.config import load, parse_address

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    settings = load(config)
    for name, text in (("listen", listen), ("metrics_listen", metrics_listen)):
        if text is None:
            continue
        try:
            setattr(settings.gateway, name, parse_address(text))
        except ValueError as error:
            raise ConfigError(f"--{name.replace('_', '-')}: {error}") from None
    _run(server.serve(settings, catalogue.load(settings.models_config)))


@app.command
def status(*, endpoint: Annotated[str, Parameter(name=["--endpoint", "-e"])] = "http://localhost:31313") -> None:
    """Show a running gateway's health and where its models are.

    Args:
        endpoint: base URL of the gateway.
    """
    import json

    base = endpoint.rstrip("/")
    health, models = _get(f"{base}/health"), _get(f"{base}/v1/models")
    try:
        lines = [_model_line(model) for model in models["data"]]
    except (KeyError, TypeError):
        raise HelexaError(f"{base} does not answer as a gateway does") from None
    print(json.dumps(health, indent=2), *lines, sep="\n")


def main() -> None:
    """Entry point."""
    try:
        app()
    except HelexaError as error:
        print(f"cortex: {error}", file=sys.stderr)
        sys.exit(EXIT_FAILED)


def _model_line(model: dict[str, Any]) -> str:
    places = ", ".join(f"{place['node']}({place['status']})" for place in model["locations"])
    return f"{model['id']:<{_ID_COLUMNS}} {places}".rstrip()


def _get(url: str) -> Any:
    import json
    import urllib.request
    from http.client import HTTPException

    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # as nodes are asked: past any proxy
    try:
        with direct.open(url, timeout=_STATUS_TIMEOUT_SECS) as response:
            return json.load(response)
    except (OSError, ValueError, HTTPException) as error:
        reason = " ".join(str(getattr(error, "reason", error)).split())
        print(f"cortex: {url} gave no answer: {reason}", file=sys.stderr)
        sys.exit(EXIT_UNREACHABLE)


def _run(work: Any) -> None:
    import asyncio

    try:
        from uvloop import new_event_loop
    except ImportError:
        new_event_loop = None
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(work)
