"""`helexa load` and `unload`: models of a running gateway."""

import sys
import threading
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from helexa.cli.flags_and_completion import GatewayUrl, ModelName, Quiet
from helexa.cli.gateway_client import Gateway
from helexa.cli.terminal_output_and_errors import MODEL_NOT_FOUND, USAGE, CommandError, Progress, note, printable
from helexa.cli.up_state_keys_and_logs import local_gateway
from helexa.core.display import memory_text
from helexa.core.model_source_ids import bare_id, is_path, typed_source

_LOAD_SECONDS = 630.0  # the gateway answers after 600 s at the latest
_UNLOAD_SECONDS = 330.0  # the gateway waits 300 s for running requests
_POLL_SECONDS = 0.3


def load(
    model: ModelName, /, *models: ModelName, node: str | None = None, url: GatewayUrl = None, quiet: Quiet = False
) -> None:
    """Load models on a running gateway before their first request.

    Args:
        model: Model name, as in `helexa list`.
        models: Further models.
        node: Node to load on. Default: the gateway chooses.
        quiet: Print nothing.
    """
    gateway = local_gateway(url)
    for name in (model, *models):
        answer = _load(gateway, name, node, quiet)
        if not quiet:
            note(printable(f"{answer['model']} is loaded on {answer['node']}{_memory(gateway, answer)}"))


def unload(
    *models: ModelName,
    all_models: Annotated[bool, Parameter(name="--all", negative="")] = False,
    node: str | None = None,
    url: GatewayUrl = None,
    quiet: Quiet = False,
) -> None:
    """Unload models from a running gateway. Running requests end first.

    The files of the models stay on the disk.

    Args:
        models: Model names, as in `helexa ps`.
        all_models: Unload all models.
        node: Node to unload from. Default: all nodes.
        quiet: Print nothing.
    """
    if bool(models) == all_models:
        problem = "models are named together with --all" if models else "no model is named"
        raise CommandError(f"{problem}; name the models to unload, or use --all", USAGE)
    gateway = local_gateway(url)
    for name in models or _loaded(gateway, node):
        unload_one(gateway, name, node)
        if not quiet:
            note(printable(f"{name} is unloaded"))


def unload_one(gateway: Gateway, name: str, node: str | None = None) -> None:
    """Unload a model from `node` (None: all nodes), after its running requests.

    Raises:
        CommandError: the model is not loaded, or the gateway rejects the request.
    """
    typed = typed_source(name)
    body = {"model": bare_id(typed) if is_path(typed) else typed, **({} if node is None else {"node": node})}
    try:
        gateway.post("/api/models/unload", body, _UNLOAD_SECONDS)
    except CommandError as error:
        if error.exit_code != MODEL_NOT_FOUND:
            raise
        loaded = ", ".join(_loaded(gateway, node)) or "none"
        raise CommandError(
            printable(f"model '{name}' is not loaded; loaded models: {loaded}"), MODEL_NOT_FOUND
        ) from None


def _load(gateway: Gateway, name: str, node: str | None, quiet: bool) -> dict[str, Any]:
    """Load a model, show the progress, and return the gateway's answer."""
    typed = typed_source(name)
    typed = str(Path(typed.removeprefix("file:")).expanduser().absolute()) if is_path(typed) else typed
    body = {"model": typed, **({} if node is None else {"node": node})}
    answers: list[dict[str, Any] | Exception] = []

    def ask() -> None:
        try:
            answers.append(gateway.post("/api/models/load", body, _LOAD_SECONDS))
        except Exception as error:
            answers.append(error)

    # A daemon thread lets Ctrl-C end this command at once. The gateway continues the load.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    with Progress() as progress:
        while thread.is_alive():
            thread.join(_POLL_SECONDS)
            if thread.is_alive() and sys.stderr.isatty() and not quiet:
                progress.show(*_progress(gateway, name))
    answer = answers[0]
    if isinstance(answer, CommandError) and answer.exit_code == MODEL_NOT_FOUND:
        message = f"model '{name}' is on no node; download it with `helexa pull {name}`"
        raise CommandError(printable(message), MODEL_NOT_FOUND)
    if isinstance(answer, Exception):
        raise answer
    return answer


def _progress(gateway: Gateway, name: str) -> tuple[str, float | None]:
    try:
        loads = [load for node in gateway.node_reports() for load in node.loads]
    except CommandError:
        loads = []
    current = next((load for load in loads if load.model == name), loads[0] if len(loads) == 1 else None)
    stage = (current.stage if current else None) or "loading"
    return printable(f"{name}: {stage}"), current.fraction if current else None


def _memory(gateway: Gateway, answer: dict[str, Any]) -> str:
    for node in gateway.node_reports():
        for info in node.models:
            size = info.vram_used_mb if info.granted_mb is None else info.granted_mb
            if (node.name, info.id) == (answer["node"], answer["model"]) and size is not None:
                return f", {memory_text(size)}"
    return ""


def _loaded(gateway: Gateway, node: str | None) -> list[str]:
    reports = [report for report in gateway.node_reports() if node in (None, report.name) and report.kind == "neuron"]
    return list(dict.fromkeys(info.id for report in reports for info in report.models))
