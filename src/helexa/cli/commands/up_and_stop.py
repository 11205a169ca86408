"""`helexa up` and `helexa stop`: run one node and one gateway, and end them."""

import importlib.util
import json
import os
import shlex
import shutil
import sys
import time
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter, validators

from helexa.cli.commands.load_and_unload import unload
from helexa.cli.flags_and_completion import LocalEngineFlags, ModelName, Quiet, Verbose
from helexa.cli.gateway_client import DEFAULT_URL, Gateway
from helexa.cli.local_config import LOOPBACK, OLLAMA_OPTION, OLLAMA_PORT, LocalConfig, LocalModel, check_ports
from helexa.cli.model_loading_and_download_bar import with_hint
from helexa.cli.terminal_output_and_errors import USAGE, CommandError, Progress, note, printable
from helexa.cli.up_child_processes import Stack
from helexa.cli.up_state_keys_and_logs import (
    configured_key,
    generated_key,
    log_files,
    only_running,
    recorded,
    running_ups,
    state_folder,
    writing_to,
)
from helexa.core.address import is_loopback
from helexa.core.errors import SourceError, not_installed
from helexa.core.node_reports import Activation, Health
from helexa.cortex.access.sign_in_links import LIFETIME_SECS, sign_in_url

DEFAULT_MODEL = "helexa/small"

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
    model: Annotated[
        list[str] | None, Parameter(name=["--model", "--models", "-m", "-hf", "--hf-repo"], negative="")
    ] = None,
    served_model_name: Annotated[list[str] | None, Parameter(negative="")] = None,
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
    models_dir: Annotated[list[Path] | None, Parameter(negative="")] = None,
    idle_unload_secs: Annotated[float | None, Parameter(validator=validators.Number(gte=0))] = None,
    api_key: str | None = None,
    api_key_file: Path | None = None,
    insecure: Annotated[bool, Parameter(negative="")] = False,
    ollama: Annotated[bool, Parameter(negative="")] = False,
    verbose: Verbose = False,
    log_dir: Path | None = None,
) -> int:
    """Start one neuron and one cortex, and run them until Ctrl-C.

    Args:
        models: Models to load: org/name, pypi:package or a path. Default: a small model.
        model: The same as an argument MODELS. May be given several times.
        served_model_name: Name of the model in requests, if there is one model. Further names are aliases.
        host: Address the gateway listens on; the neuron and the metrics stay on 127.0.0.1. If other machines can reach
            the address, clients need an API key.
        port: Port of the gateway.
        metrics_port: Port of the gateway's metrics.
        neuron_port: Port of the neuron.
        tensor_parallel: Number of processes that compute each model together on the machine's CPUs.
        models_dir: Folder with models to serve on demand, besides the caches. May be given several times.
        idle_unload_secs: Seconds without requests after which a model gives its memory back, until the next request.
            0: never. Default: 600, or never if no prompts are kept on disk.
        api_key: Key that clients must send, else the key in --api-key-file or in HELEXA_UP_API_KEY. Default with a
            --host that other machines can reach: a generated key.
        api_key_file: File with the key that clients must send.
        insecure: Allow every client that can reach --host to use the gateway without a key.
        ollama: Let the gateway also listen on port 11434, where programs look for Ollama.
        verbose: Show the logs of both servers.
        log_dir: Folder for their logs, which `helexa logs` prints.
    """
    names = dict.fromkeys([*models, *(model or ())] or [DEFAULT_MODEL])
    local_models = tuple(map(_local_model, names))
    served_as, *other_names = served_model_name or [""]
    if served_as:
        if len(local_models) != 1:
            raise CommandError("--served-model-name needs exactly one model; start the models with their ids", USAGE)
        local_models = (local_models[0].served_as(served_as),)
    ids = [one.id for one in local_models]
    if twin := next((name for name in ids if ids.count(name) > 1), None):
        raise CommandError(
            f"two models would have the id '{twin}'; start only one of them, or rename the file of one", USAGE
        )
    key = configured_key(api_key, api_key_file, os.environ)
    if insecure and key is not None:
        raise CommandError(
            "--insecure starts the gateway without a key, but --api-key, --api-key-file or HELEXA_UP_API_KEY "
            "sets a key; leave out --insecure or the key",
            USAGE,
        )
    if importlib.util.find_spec("tokenizers") is None:
        raise CommandError(not_installed("tokenizers", "neuron"))
    ports = {"--port": port, "--metrics-port": metrics_port, "--neuron-port": neuron_port}
    check_ports(host, ports | ({OLLAMA_OPTION: OLLAMA_PORT} if ollama else {}))
    folder = state_folder("up", str(port))
    logs = (log_dir or folder).absolute()
    logs.mkdir(parents=True, exist_ok=True)
    require_key = key is not None or not (insecure or is_loopback(host))
    with writing_to(folder):
        log_file = log_files(folder, logs)
        key = key or generated_key(folder)
    config = LocalConfig(
        local_models,
        host,
        port,
        metrics_port,
        neuron_port,
        key,
        require_key,
        tensor_parallel,
        engine.model_settings(),
        ollama,
        dict.fromkeys(other_names, served_as),
        idle_unload_secs,
    )
    with writing_to(folder):
        neuron, cortex = config.write(folder)

    for folder_of_models in models_dir or ():
        if not folder_of_models.expanduser().is_dir():
            raise CommandError(
                f"--models-dir: {folder_of_models}: no such folder; create it or correct the path", USAGE
            )
    folders = [f"--models-dir={models.expanduser().absolute()}" for models in models_dir or ()]
    for line in engine.notes():
        note(line)
    # `recorded` removes its file after the servers have ended. `helexa stop` waits for this removal, so that the ports
    # are free when it returns.
    with recorded(folder, config.gateway_url), Stack(config.environment(os.environ), verbose) as stack:
        stack.start("helexa.neuron", ["--config", str(neuron), *engine.arguments(), *folders], log_file["node"])
        stack.start("helexa.cortex", ["serve", "--config", str(cortex)], log_file["gateway"])
        with Progress(plain=verbose) as progress:
            activation = _until_loaded(stack, Gateway(config.neuron_url), progress, log_file["node"])
            served = _until_served(stack, Gateway(config.gateway_url, key), progress) if activation else []
        if activation and served:
            for failure in _failures(activation):
                note(failure)
            if (reason := _slow_reason(engine)) is not None:
                note(f"models run slowly: {reason}")
            if config.is_open:
                note(f"--insecure: the gateway serves everyone who can reach {host} port {port}, without a key")
            announce(config, served[0], key, logs)
            while stack.watch():
                pass
        note("stopping")
    return 0


def _local_model(name: str) -> LocalModel:
    """Return the model that an argument names. An error suggests similar names."""
    try:
        return LocalModel.parse(name)
    except SourceError as error:
        raise with_hint(error, name) from error


def _until_loaded(stack: Stack, neuron: Gateway, progress: Progress, log: Path) -> Activation | None:
    """Wait until the node has loaded its models, and return its report on the loads.

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
        # Extend the deadline at each response, because a loading node on a busy machine may leave a poll unanswered.
        deadline = time.monotonic() + _LISTEN_SECONDS
        if activation.state == "ready":
            if not activation.completed:
                raise CommandError(
                    "; ".join(_failures(activation)) or "the node has loaded no model; see `helexa logs`"
                )
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
        return None  # The node does not listen yet. If it has ended, `Stack.watch` raises an error.


def _check_deadline(deadline: float, server: Gateway) -> None:
    if time.monotonic() > deadline:
        raise CommandError(
            f"nothing answers at {server.url} after {_LISTEN_SECONDS:.0f} s; see the logs with `helexa logs`"
        )


def _failures(activation: Activation) -> list[str]:
    return [printable(f"could not load {failed.model_id}: {failed.error}") for failed in activation.failed]


def _stage(activation: Activation, log: Path) -> tuple[str, float | None]:
    if activation.in_progress is None:
        return printable(f"waiting to load {', '.join(activation.pending)}; {log} says why"), None
    doing = _STAGES.get(activation.stage or "", "loading")
    return printable(f"{doing} {activation.in_progress}"), activation.progress


def announce(config: LocalConfig, model: str, key: str, logs: Path) -> None:
    """Print how clients reach the servers that `helexa up` has started.

    Args:
        config: addresses of the servers.
        model: model of the example requests.
        key: API key of the gateway.
        logs: folder of the servers' logs.
    """
    url, require_key, model = config.gateway_url, config.require_auth, printable(model)
    ollama = f"\n  Ollama    {config.ollama_url}" if config.ollama else ""
    request = json.dumps({"model": model, "messages": [{"role": "user", "content": "Say hello."}]})
    chat = f"{_command()} chat" + ("" if url == DEFAULT_URL else f" --url {url}")
    export = f"export HELEXA_API_KEY={shlex.quote(key)}\n  " if require_key else ""
    bearer = '-H "Authorization: Bearer $HELEXA_API_KEY" ' if require_key else ""
    lan = "" if config.lan_url is None else f"\n            {config.lan_url}/v1 from other machines"
    print(
        f"""
helexa is up. Point any OpenAI client at it:

  base URL  {url}/v1{lan}
  model     {model}
  API key   {key if require_key else "any"}
  console   {_console(url, key)}{ollama}

Try it:

  {export}{chat}
  curl {url}/v1/chat/completions {bearer}-H 'Content-Type: application/json' -d {shlex.quote(request)}

Logs are in {logs} (`{_command()} logs -f` shows them); Ctrl-C or `{_command()} stop` stops everything.""",
        flush=True,
    )


def _console(url: str, key: str) -> str:
    """Return the address of the console.

    On a terminal, the address is a link that signs the browser in. If stdout is a file or a service's journal, no link
    is returned, because other users could read the link there and use it first.
    """
    renew = f"`{_command()} console{'' if url == DEFAULT_URL else f' --url {url}'}`"
    if not sys.stdout.isatty():
        return f"{url}\n            {renew} prints a link that signs a browser on this machine in"
    limit = f"signs your browser in once, for {LIFETIME_SECS // 60} minutes"
    return f"{sign_in_url(url, key)}\n            {limit}; {renew} prints a new link"


def _command() -> str:
    """Return the shell command that starts `helexa` again.

    The command is `helexa` if a program of this name is on the PATH, else the path of the running program, or
    `PYTHON -m helexa` if the program is a Python file.
    """
    called = Path(sys.argv[0])
    if shutil.which("helexa"):
        return "helexa"
    return f"{shlex.quote(sys.executable)} -m helexa" if called.suffix == ".py" else shlex.quote(str(called))


def _slow_reason(engine: LocalEngineFlags) -> str | None:
    """Return why models on the CPU run slowly; None if they do not, or run on a GPU."""
    from helexa.neuron.hardware.device_choice import device_for
    from helexa.neuron.ops.native.compilation import why_unavailable

    if engine.device not in (None, "auto", "cpu") or (reason := why_unavailable()) is None:
        return None
    return reason if engine.device == "cpu" or device_for(model_bytes=0).device == "cpu" else None


def stop(
    *models: ModelName,
    port: int | None = None,
    all_running: Annotated[bool, Parameter(name="--all", negative="")] = False,
    url: str | None = None,
    quiet: Quiet = False,
) -> None:
    """Stop the `helexa up` of this machine, or unload the named models.

    Args:
        models: Models to unload, as `helexa unload` does. Default: stop `helexa up`.
        port: Port of the gateway of the `helexa up` to stop, if several run.
        all_running: Stop all of them.
        url: Gateway from which to unload the models.
        quiet: Print nothing.
    """
    if models:
        if port is not None or all_running:
            raise CommandError(
                "--port and --all choose a `helexa up` to stop, not models to unload; choose the gateway with --url",
                USAGE,
            )
        unload(*models, url=url, quiet=quiet)
        return
    if url is not None:
        raise CommandError(
            "--url needs the models to unload; to stop a `helexa up` of this machine, choose it with --port", USAGE
        )
    for up in running_ups() if all_running and running_ups() else [only_running(port)]:
        up.stop()
        if not quiet:
            note(f"stopped the `helexa up` of {up.url}")
