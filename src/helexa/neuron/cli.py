"""The `neuron` command line; commands import heavy modules when they run."""

import os
import socket
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

from cyclopts import App, Parameter, validators

from helexa.core.command_line import VERSION_FLAGS, call, run_program
from helexa.core.errors import ConfigError, HelexaError, UsageError
from helexa.core.version import version_line
from helexa.neuron.engine_flags import EngineFlags, complete_flags

if TYPE_CHECKING:
    from collections.abc import Callable

    from helexa.neuron.app import NodeServer
    from helexa.neuron.config import NeuronConfig
    from helexa.neuron.host_group import GroupSettings, Membership
    from helexa.neuron.join import JoinRequest

app = App(
    name="neuron",
    help="Serve models on this machine.",
    version=partial(version_line, "neuron"),
    version_flags=VERSION_FLAGS,
)

Ranks = Annotated[int, Parameter(validator=validators.Number(gte=2, lte=64))]
ConfigPath = Annotated[Path | None, Parameter(name=["--config", "-c"])]


def main() -> NoReturn:
    """Run the `neuron` command. If it fails, print one line to stderr.

    Exit codes: 0 success, 1 failure, 2 wrong usage, 78 wrong configuration.
    """
    run_program("neuron", lambda tokens: call(app, complete_flags(tokens)), tracebacks=True)


@app.command
@app.default
def serve(
    *models: str,
    config: ConfigPath = None,
    port: Annotated[int | None, Parameter(name=["--port", "-p"], validator=validators.Number(gte=1, lte=65535))] = None,
    host: str | None = None,
    model: Annotated[
        list[str] | None, Parameter(name=["--model", "--models", "-m", "-hf", "--hf-repo"], negative=())
    ] = None,
    served_model_name: str | None = None,
    models_dir: Annotated[list[Path] | None, Parameter(negative=())] = None,
    api_key: str | None = None,
    engine: EngineFlags = EngineFlags(),  # noqa: B008
    graphs: bool | None = None,
    overlap: bool | None = None,
    hosts: Annotated[int | None, Parameter(validator=validators.Number(gte=2))] = None,
    log_format: Literal["text", "json"] | None = None,
    tp_smoke: Annotated[bool, Parameter(show=False, negative=())] = False,
    tp_size: Annotated[Ranks, Parameter(show=False)] = 2,
    joining: Annotated[Any, Parameter(parse=False)] = None,
) -> None:
    """Serve models until a signal stops the process.

    Parameters
    ----------
    models
        Models to load at start, in addition to the configured models: an id, org/name, pypi:package or a path.
    config
        A neuron.toml. Without a file, defaults and NEURON_* variables apply.
    port
        Port to listen on; overrides the configuration (13131).
    host
        Address to listen on; overrides the configuration (127.0.0.1).
    model
        The same as an argument MODELS. Repeatable.
    served_model_name
        Name of the model in requests, if the command line has one model.
    models_dir
        Folder with models to report to gateways, besides the caches; overrides the configuration. Repeatable.
    api_key
        Key that clients must send; overrides the configuration. Other users of the machine can see the option for a
        moment, so prefer the variable NEURON_API_KEY.
    graphs
        On a GPU, run decode steps as CUDA graphs; overrides the configuration (yes).
    overlap
        Launch each step before the previous step's output is read; overrides the configuration (on GPUs).
    hosts
        Number of hosts that compute models together (a host group). RANK, MASTER_ADDR and MASTER_PORT name this host's
        number and host 0; NEURON_GROUP__INTERFACE and NEURON_GROUP__SECRET_FILE are required as well.
    log_format
        Log plain text lines or JSON objects; overrides the configuration (text).
    tp_smoke
        Run `neuron smoke` instead. Former name of the command.
    tp_size
        Former name of the option `--ranks` of `neuron smoke`.
    joining
        Request to join a gateway, which is sent as soon as the node serves. If the gateway rejects it, the node ends.
    """
    if tp_smoke:
        smoke(ranks=tp_size, config=config)
        return
    import logging

    from helexa.core import logs, tracing
    from helexa.core.command_line import hide_argument
    from helexa.core.model_source_ids import ModelSource, typed_source
    from helexa.http.process import run
    from helexa.neuron.builtin_models import source_text
    from helexa.neuron.config import DefaultModel, exposure, log_unknown_variables, read_config
    from helexa.neuron.processes import heaps_and_shared_memory

    heaps_and_shared_memory.bound_heaps()
    if api_key is not None:
        hide_argument(api_key)  # other users can read the arguments of a process
    warnings: list[str] = []
    options = {
        ("port",): ("--port", port),
        ("host",): ("--host", host),
        ("api_key",): ("--api-key", api_key),
        ("models_dirs",): ("--models-dir", models_dir and [str(folder.absolute()) for folder in models_dir]),
        ("harness", "torch", "graphs"): ("--graphs", graphs),
        ("harness", "torch", "overlap"): ("--overlap", overlap),
        ("log", "format"): ("--log-format", log_format),
    }
    flags = {keys: option for keys, option in options.items() if option[1] is not None} | engine.settings()
    settings = read_config(config, warn=warnings.append, flags=flags)
    started_with = settings.model_copy(deep=True)
    names = [*models, *(model or ())]
    if engine.model_settings() and not names:
        raise UsageError(
            "--quantization, --tool-call-parser, --draft-model and --chat-template need a model on the command line; "
            "add one"
        )
    if served_model_name is not None and len(names) != 1:
        raise UsageError(f"--served-model-name needs exactly one model on the command line, not {len(names)}")
    for name in map(typed_source, names):
        ModelSource.parse(name, settings.harness.torch.default_source)
        id = {"model_id": name}
        if served_model_name is not None:
            id = {"model_id": served_model_name, "source": source_text(DefaultModel(model_id=name))}
        settings.default_models.append(DefaultModel.model_validate(id | engine.model_settings()))
    logs.configure(settings.log.format, settings.log.level)
    tracing.configure("neuron")
    if settings.log.prompts:
        from helexa.neuron.requests.prompt_images_and_thinking import enable_prompt_log

        enable_prompt_log()
    log = logging.getLogger("helexa.neuron")
    for warning in warnings:
        log.warning("%s", warning)
    for text in engine.notes():
        log.info("%s", text)
    log_unknown_variables()
    _prepare_engines(settings)
    group = _group_settings(settings, hosts)
    if group is not None and group.host:
        from helexa.neuron.stage_processes import run_member

        run_member(group, settings)
        return
    # The port is bound before all slow work, so that a port in use is reported at once and not after a load.
    listener = _listen(settings.host, settings.port, config)
    membership = None
    if group is not None:
        from helexa.neuron.host_group import Membership

        membership = Membership(group)
        membership.start()
    if (exposed := exposure(settings)) is not None:
        log.warning("%s", exposed)
    log.info("listening url=http://%s:%d", settings.host, settings.port)
    run(_serve(settings, listener, membership, started_with, partial(read_config, config, flags=flags), joining))


@app.command
def join(
    gateway: str,
    /,
    *,
    token: str | None = None,
    name: str | None = None,
    address: str | None = None,
    config: Annotated[Path, Parameter(name=["--config", "-c"])] = Path("neuron.toml"),
    service: str | None = None,
) -> None:
    """Become a node of a gateway, and serve models.

    An administrator creates the token with `cortex nodes invite`.

    The command writes a new key and the address to listen on into neuron.toml, if they are missing, and starts the
    node, if it is not running. Afterwards, start the node with `neuron serve --config neuron.toml`.

    Parameters
    ----------
    gateway
        URL of the gateway.
    token
        The token. Other users of the machine can see the option for a moment, so prefer the variable HELEXA_JOIN_TOKEN.
    name
        Name of this node; default: the host name.
    address
        URL under which the gateway reaches this node; default: the address from which this machine reaches the gateway.
    config
        The neuron.toml to write.
    service
        systemd unit that runs the node, such as `neuron`. The unit is restarted, and this process serves no models.
    """
    from pydantic import SecretStr

    from helexa.core.command_line import hide_argument
    from helexa.neuron import join as joining

    if token is not None:
        hide_argument(token)
    secret = token or os.environ.get("HELEXA_JOIN_TOKEN", "")
    if not secret:
        raise UsageError(
            "joining a gateway needs a token; create one with `cortex nodes invite`, and set --token or the variable "
            "HELEXA_JOIN_TOKEN"
        )
    request, settings, changes = joining.prepare(
        gateway, SecretStr(secret), name=name, address=address, path=config, service=service
    )
    for line in changes:
        print(line, flush=True)
    if service is not None:
        joining.restart(service, settings)
    elif not joining.is_running(settings):
        serve(config=config, joining=request)
        return
    elif not joining.accepts_key(settings):
        raise HelexaError(
            f"another server, or a node without the key in {config}, listens on port {settings.port}; restart the node "
            "(with systemd: --service neuron), or end the other server"
        )
    print(f"joined {request.gateway} as {request.name}, at {request.send()}")


@app.command
def doctor(
    *, config: ConfigPath = None, as_json: Annotated[bool, Parameter(name="--json", negative="")] = False
) -> None:
    """Report the hardware, the kernels of engines, and missing requirements.

    Exit code 1 means that a problem prevents serving the configured models.

    Parameters
    ----------
    config
        The neuron.toml to check as well.
    as_json
        Print the report as JSON.
    """
    from helexa.neuron.config import read_config
    from helexa.neuron.doctor import examine, report

    settings = read_config(config)
    _prepare_engines(settings)
    if not report(examine(settings), as_json=as_json):
        raise SystemExit(1)


@app.command
def smoke(
    model: str = "helexa/small",
    *,
    ranks: Ranks = 2,
    config: ConfigPath = None,
) -> None:
    """Test whether a model can be divided among several processes.

    The test verifies and times the exchanges between the processes, compares 16 tokens with those of one process, and
    kills one process. The last line is status=ok or status=failed. Exit code 1 means that a part of the test failed.

    Parameters
    ----------
    model
        The model to divide: an id, org/name, pypi:package or a path.
    ranks
        Number of processes.
    config
        The neuron.toml with the engine's options.
    """
    import asyncio

    from helexa.neuron.config import read_config
    from helexa.neuron.validate_and_smoke import smoke as run_smoke

    settings = read_config(config)
    _prepare_engines(settings)
    try:
        asyncio.run(run_smoke(settings, model, ranks, lambda line: print(line, flush=True)))
    except HelexaError:
        print("status=failed", flush=True)
        raise
    print(f"status=ok ranks={ranks}", flush=True)


@app.command
def validate(
    model: str | None = None,
    *,
    config: ConfigPath = None,
    engine: EngineFlags = EngineFlags(),  # noqa: B008
    as_json: Annotated[bool, Parameter(name="--json", negative="")] = False,
) -> None:
    """Test whether this machine serves a model, with a load and 16 tokens.

    Each check prints one line. The last line is status=ok or status=failed. Exit code 1 means that a check failed.

    Parameters
    ----------
    model
        The model to load: an id, org/name, pypi:package or a path. Default: the first configured model, else a small
        model.
    config
        The neuron.toml with the engine's options.
    as_json
        Print the results as JSON.
    """
    import asyncio
    import json

    from helexa.neuron.config import DefaultModel, read_config
    from helexa.neuron.validate_and_smoke import validate as run_validation

    settings = read_config(config, flags=engine.settings())
    _prepare_engines(settings)
    if model is None and settings.default_models and not engine.model_settings():
        spec = settings.default_models[0]
    else:
        spec = DefaultModel.model_validate({"model_id": model or "helexa/small", **engine.model_settings()})

    async def run() -> bool:
        results = []
        async for result in run_validation(settings, spec):
            results.append(result)
            if not as_json:
                mark = {"fine": "ok   ", "note": "note ", "fault": "ERROR"}[result.level]
                print(f"{mark} {result.topic}: {result.text}", flush=True)
        ok = all(result.level != "fault" for result in results)
        if as_json:
            print(json.dumps({"ok": ok, "checks": [result._asdict() for result in results]}, indent=2))
        return ok

    ok = asyncio.run(run())
    if not as_json:
        print(f"status={'ok' if ok else 'failed'}", flush=True)
    if not ok:
        raise SystemExit(1)


def _prepare_engines(settings: "NeuronConfig") -> None:
    """Set `$HELEXA_CACHE`, which engines inherit, if a cache folder is configured."""
    from helexa.neuron.cache_folder import cache_root

    if settings.cache.dir is not None:
        os.environ["HELEXA_CACHE"] = str(cache_root(settings.cache.dir).absolute())


def _group_settings(settings: "NeuronConfig", hosts: int | None) -> "GroupSettings | None":
    """Return the settings of the host group; None if the node has no group.

    Args:
        hosts: number of hosts from the command line, which overrides the configuration.
    """
    from helexa.neuron.config import GroupConfig
    from helexa.neuron.host_group import group_settings

    if hosts is not None:
        settings.group = settings.group or GroupConfig()
        settings.group.world_size = hosts
    return None if settings.group is None else group_settings(settings.group, os.environ)


def _listen(host: str, port: int, config: Path | None) -> socket.socket:
    from helexa.http.listener import AddressInUseError, bind

    place = f"port in {config}" if config is not None else "NEURON_PORT"
    try:
        return bind((host, port))
    except AddressInUseError:
        raise ConfigError(
            f"port {port} is in use by another process; end that process, or choose another port with --port or {place}"
        ) from None
    except ConfigError as error:
        raise ConfigError(
            f"{error}; choose another address with --host or NEURON_HOST, and another port with --port or {place}"
        ) from None


async def _serve(
    settings: "NeuronConfig",
    listener: socket.socket,
    group: "Membership | None",
    started_with: "NeuronConfig",
    read: "Callable[[], NeuronConfig]",
    joining: "JoinRequest | None",
) -> None:
    """Serve on a listening socket until a signal stops the process.

    Args:
        settings: the configuration, with the models of the command line.
        group: the hosts that compute models together with this node, or None.
        started_with: the configuration as `read` returned it at the start.
        read: function that reads the configuration again.
        joining: request to join a gateway, which is sent while the node serves, or None.
    """
    import asyncio

    from helexa.neuron.engine_client.process_and_standby import WarmStandby

    standby = WarmStandby()
    try:
        if settings.default_models:
            await standby.begin()  # the engine process imports torch while this process imports the server
        from helexa.neuron.app import NodeServer, create_app

        app = create_app(settings, standby=standby, group=group)
        server = NodeServer(app, started_with, read)
        task = None if joining is None else asyncio.create_task(_join(server, joining))
        await server.serve(listener)
        del task  # until here, this reference protects the task from garbage collection
    finally:
        await standby.close()


async def _join(server: "NodeServer", request: "JoinRequest") -> None:
    """Send the request to join a gateway; end the node if the request fails."""
    import asyncio

    try:
        url = await asyncio.to_thread(request.send)
    except HelexaError as error:
        print(f"neuron: {error}", file=sys.stderr, flush=True)
        server.fail(error.exit_code)
    else:
        print(f"joined {request.gateway} as {request.name}, at {url}", flush=True)


node = App(name="node", help=app.help, version=partial(version_line, "helexa"), version_flags=VERSION_FLAGS)
"""The application as `helexa node`."""
node.update(app)
node.default(serve)
