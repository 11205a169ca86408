"""`helexa up`: run one node (neuron) and one gateway (cortex) on this machine until the command ends."""

import errno
import importlib.util
import json
import os
import shlex
import shutil
import socket
import sys
import time
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter, validators

from helexa.cli.commands.completion import ModelName
from helexa.cli.failure import CONFIG, USAGE, CommandError
from helexa.cli.flags import LocalEngineFlags
from helexa.cli.gateway import DEFAULT_URL, Gateway
from helexa.cli.local.api_key import checked_key, generated_key
from helexa.cli.local.local_config import LOOPBACK, LocalConfig, LocalModel
from helexa.cli.local.stack import Stack
from helexa.cli.local.state_folder import state_folder
from helexa.cli.terminal import Progress, note, printable
from helexa.core.extras import not_installed
from helexa.core.fleet import Activation, Health
from helexa.http.origin import is_loopback

DEFAULT_MODEL = "helexa/small"

_NEURON_LOG = "neuron.log"
_TICK_SECONDS = 0.2
_REPLY_SECONDS = 2.0
_LISTEN_SECONDS = 60.0
_STAGES = {
    "list": "looking up",
    "wait": "waiting for another download of",
    "download": "downloading",
    "unpack": "unpacking",
    "tokenizer": "reading the tokenizer of",
}

Port = Annotated[int, Parameter(validator=validators.Number(gte=1, lte=65535))]


def up(
    *models: ModelName,
    model: Annotated[list[str] | None, Parameter(alias="-m", negative="")] = None,
    host: str = LOOPBACK,
    port: Port = 31313,
    metrics_port: Port = 31314,
    neuron_port: Port = 13131,
    tensor_parallel: Annotated[
        int,
        Parameter(
            name=["--tensor-parallel", "--tensor-parallel-size", "-tp"], validator=validators.Number(gte=1, lte=64)
        ),
    ] = 1,
    engine: LocalEngineFlags = LocalEngineFlags(),  # noqa: B008
    api_key: str | None = None,
    insecure: Annotated[bool, Parameter(negative="")] = False,
    verbose: Annotated[bool, Parameter(negative="")] = False,
    log_dir: Path | None = None,
) -> int:
    """Start one neuron and one cortex on this machine and keep them running until Ctrl-C.

    Args:
        models: Models to load: org/name, pypi:package or a path. Default: a small model.
        model: The same as an argument MODELS. May be given several times.
        host: Address the gateway listens on; the neuron and the metrics stay on 127.0.0.1. If other machines can reach
            the address, clients need an API key.
        port: Port of the gateway.
        metrics_port: Port of the gateway's metrics.
        neuron_port: Port of the neuron.
        tensor_parallel: Number of processes that compute each model together on the machine's CPUs.
        api_key: Key that clients must send. Default with a --host that other machines can reach: a generated key.
        insecure: Allow every client that can reach --host to use the gateway without a key.
        verbose: Show the logs of both servers.
        log_dir: Folder for their logs.
    """
    names = dict.fromkeys([*models, *(model or ())] or [DEFAULT_MODEL])
    local_models = tuple(map(LocalModel.parse, names))
    ids = [one.id for one in local_models]
    if twin := next((name for name in ids if ids.count(name) > 1), None):
        raise CommandError(f"two models would have the id '{twin}'; start one of them, or rename its file", USAGE)
    if insecure and api_key is not None:
        raise CommandError("--insecure and --api-key contradict each other", USAGE)
    key = None if api_key is None else checked_key(api_key)
    if importlib.util.find_spec("torch") is None:
        raise CommandError(not_installed("torch", "neuron"))
    _check_ports(host, {"--port": port, "--metrics-port": metrics_port, "--neuron-port": neuron_port})
    folder = state_folder("up", str(port))
    logs = (log_dir or folder).absolute()
    logs.mkdir(parents=True, exist_ok=True)
    if key is None and not insecure and not is_loopback(host):
        key = generated_key(folder)
    config = LocalConfig(
        local_models, host, port, metrics_port, neuron_port, key, tensor_parallel, engine.model_settings()
    )
    neuron, cortex = config.write(folder)

    for line in engine.notes():
        note(line)
    with Stack(config.environment(os.environ), verbose) as stack:
        stack.start("helexa.neuron", ["--config", str(neuron), *engine.arguments()], logs / _NEURON_LOG)
        stack.start("helexa.cortex", ["serve", "--config", str(cortex)], logs / "cortex.log")
        with Progress(plain=verbose) as progress:
            activation = _until_loaded(stack, Gateway(config.neuron_url), progress, logs / _NEURON_LOG)
            served = _until_served(stack, Gateway(config.gateway_url, key), progress) if activation else []
        if activation and served:
            for failure in _failures(activation):
                note(failure)
            if config.is_open:
                note(f"--insecure: the gateway serves everyone who can reach {host} port {port}, without a key")
            _announce(config.gateway_url, served[0], key, logs)
            while stack.watch():
                pass
        note("stopping")
    return 0


def _check_ports(host: str, ports: dict[str, int]) -> None:
    for option, port in ports.items():
        twin = next(
            (other_option for other_option in ports if other_option != option and ports[other_option] == port), None
        )
        if twin:
            raise CommandError(f"{option} and {twin} are both {port}; they need different ports", USAGE)
    for option, port in ports.items():
        address = host if option == "--port" else LOOPBACK
        try:
            family, kind, protocol, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(where)
        except UnicodeError:
            raise CommandError(f"cannot listen on {address}: the host name is invalid", CONFIG) from None
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                reason = f"port {port} is already in use; stop what listens there, or choose another with {option}"
            else:
                reason = f"cannot listen on {address} port {port}: {error.strerror}"
            raise CommandError(reason, CONFIG) from None


def _until_loaded(stack: Stack, neuron: Gateway, progress: Progress, log: Path) -> Activation | None:
    """Wait until the node has loaded its models, and return which models were loaded or failed.

    Return None if a stop signal such as Ctrl-C arrives first.

    Raises:
        CommandError: a server process ended or does not respond, or no model could be loaded.
    """
    deadline = time.monotonic() + _LISTEN_SECONDS
    while stack.watch(_TICK_SECONDS):
        activation = _activation(neuron)
        if activation is None:
            _check_deadline(deadline, neuron)
            progress.show("starting")
            continue
        deadline = time.monotonic() + _LISTEN_SECONDS  # a loading node may miss a poll on a busy machine
        if activation.state == "ready":
            if not activation.completed:
                raise CommandError("; ".join(_failures(activation)) or "the node has loaded no model")
            return activation
        progress.show(*_stage(activation, log))
    return None


def _until_served(stack: Stack, cortex: Gateway, progress: Progress) -> list[str]:
    """Wait until the gateway lists loaded models, and return their ids.

    Return an empty list if a stop signal such as Ctrl-C arrives first.

    Raises:
        CommandError: a server process ended or does not respond.
    """
    deadline = time.monotonic() + _LISTEN_SECONDS
    while stack.watch(_TICK_SECONDS):
        try:
            served = [entry["id"] for entry in cortex.models(_REPLY_SECONDS) if entry.get("loaded")]
        except CommandError:
            served = []
        if served:
            return served
        _check_deadline(deadline, cortex)
        progress.show("starting")
    return []


def _activation(neuron: Gateway) -> Activation | None:
    try:
        return Health.model_validate(neuron.get("/health", _REPLY_SECONDS)).activation
    except (CommandError, ValueError):
        return None  # not listening yet; `Stack.watch` reports an ended server


def _check_deadline(deadline: float, server: Gateway) -> None:
    if time.monotonic() > deadline:
        raise CommandError(f"nothing answers at {server.url} after {_LISTEN_SECONDS:.0f} s")


def _failures(activation: Activation) -> list[str]:
    return [printable(f"could not load {failed.model_id}: {failed.error}") for failed in activation.failed]


def _stage(activation: Activation, log: Path) -> tuple[str, float | None]:
    if activation.in_progress is None:
        return printable(f"waiting to load {', '.join(activation.pending)}; {log} says why"), None
    doing = _STAGES.get(activation.stage or "", "loading")
    return printable(f"{doing} {activation.in_progress}"), activation.progress


def _announce(url: str, model: str, key: str | None, logs: Path) -> None:
    model = printable(model)
    request = json.dumps({"model": model, "messages": [{"role": "user", "content": "Say hello."}]})
    chat = f"{_command()} chat" + ("" if url == DEFAULT_URL else f" --url {url}")
    export = f"export HELEXA_API_KEY={shlex.quote(key)}\n  " if key else ""
    bearer = '-H "Authorization: Bearer $HELEXA_API_KEY" ' if key else ""
    print(
        f"""
helexa is up. Point any OpenAI client at it:

  base URL  {url}/v1
  model     {model}
  API key   {key or "any"}
  console   {url}

Try it:

  {export}{chat}
  curl {url}/v1/chat/completions {bearer}-H 'Content-Type: application/json' -d {shlex.quote(request)}

Logs are in {logs}; Ctrl-C stops everything.""",
        flush=True,
    )


def _command() -> str:
    """Return the shell command that starts `helexa` again.

    The command is `helexa` if a program of this name is on the PATH, else the path of the running program.
    """
    called = Path(sys.argv[0])
    if shutil.which("helexa"):
        return "helexa"
    return f"{shlex.quote(sys.executable)} -m helexa" if called.suffix == ".py" else shlex.quote(str(called))
