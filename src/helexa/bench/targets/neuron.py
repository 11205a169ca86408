"""Targets of kind `neuron`: nodes of helexa, which report their build, hardware and models and can load models."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from helexa.bench.identity import UNKNOWN, Build, Gpu, Host, Model
from helexa.bench.store.rows import Reading
from helexa.bench.targets.http import JsonCalls
from helexa.bench.targets.target import Identity, ServedModel, TargetError
from helexa.core.fleet import Discovery, Health, ModelInfo

ENGINE = "helexa"
RecordT = TypeVar("RecordT", bound=BaseModel)
_LOAD_SECS = 1800.0
_UNLOAD_SECS = 120.0
_NAMED_FACTS = {"git_sha", "git_sha_long", "git_dirty", "package_version", "build_timestamp"}


class NeuronTarget:
    """A helexa node. It also implements `Control`, the management API."""

    ignore_eos = True

    def __init__(self, calls: JsonCalls) -> None:
        self._calls = calls

    @property
    def control(self) -> "NeuronTarget":
        """The management API of the node, which is this object."""
        return self

    async def identity(self) -> Identity:
        """Return the build from `/version` and the hardware from `/discovery`.

        On old nodes without `/discovery`, only the host name is known.
        """
        version = await self._calls.get("/version")
        if not isinstance(version, dict):
            raise TargetError(f"{self._calls.endpoint}/version does not answer as a neuron does")
        payload = await self._calls.get_or_none("/discovery")
        discovery = None if payload is None else _parsed(Discovery, payload, self._calls.endpoint)
        return Identity(_host(discovery, self._calls.endpoint), build_of(version))

    async def models(self) -> list[ServedModel]:
        """Return the models from `/models` that are loaded and accept requests."""
        entries = await self._calls.get("/models")
        if not isinstance(entries, list):
            raise TargetError(f"{self._calls.endpoint}/models does not answer as a neuron does")
        infos = [_parsed(ModelInfo, entry, self._calls.endpoint) for entry in entries if _is_loaded(entry)]
        return [_served(info) for info in infos if info.servable is None or info.servable.ok]

    async def readings(self, at_s: float) -> list[Reading]:
        """Return a reading of each device from `/health`, with `at_s` as its time."""
        health = await self._health()
        return [
            Reading(at_s, device.index, device.vram_used_mb, device.utilization_pct, device.temp_c)
            for device in health.devices
        ]

    async def in_flight(self, model: str) -> int:
        """Return the number of running and waiting requests for `model`."""
        health = await self._health()
        return sum(load.in_flight + load.queue_depth for load in health.models if load.id == model)

    async def unload(self, model: str) -> None:
        """Unload a model and wait until its memory is free."""
        await self._calls.post("/models/unload", {"model_id": model}, _UNLOAD_SECS)

    async def load(self, spec: Mapping[str, Any]) -> None:
        """Load a model and wait until it accepts requests. `spec` is the body of the load request."""
        await self._calls.post("/models/load", dict(spec), _LOAD_SECS)

    async def _health(self) -> Health:
        return _parsed(Health, await self._calls.get("/health"), self._calls.endpoint)


def build_of(version: Mapping[str, Any]) -> Build:
    """Return the build that a node's response to `/version` describes."""
    dirty = version.get("git_dirty")
    sha = str(version.get("git_sha") or UNKNOWN)
    return Build(
        engine=ENGINE,
        sha=sha,
        sha_long=str(version.get("git_sha_long") or sha),
        version=str(version.get("package_version") or ""),
        dirty=dirty if isinstance(dirty, bool) else None,
        built_ms=_milliseconds(version.get("build_timestamp")),
        facts={name: value for name, value in sorted(version.items()) if name not in _NAMED_FACTS and value},
    )


def _milliseconds(text: object) -> int | None:
    try:
        return round(datetime.fromisoformat(str(text)).timestamp() * 1000)
    except ValueError:
        return None


def _host(discovery: Discovery | None, endpoint: str) -> Host:
    if discovery is None:
        return Host(endpoint.partition("//")[2])
    return Host(
        hostname=discovery.hostname,
        os=discovery.os,
        kernel=discovery.kernel,
        cpu=discovery.cpu,
        cpu_cores=discovery.cpu_cores,
        memory_total_mb=discovery.memory_total_mb,
        driver_version=discovery.driver_version or "",
        cuda_version=discovery.cuda_version or "",
        gpus=tuple(Gpu(device.name, device.vram_total_mb) for device in discovery.devices),
    )


def _is_loaded(entry: object) -> bool:
    return isinstance(entry, dict) and entry.get("status", "loaded") == "loaded"


def _served(info: ModelInfo) -> ServedModel:
    """Convert the information about a loaded model.

    The result contains a load request (`ServedModel.load`) with the model's current quantization, devices and ranks.
    """
    config: dict[str, Any] = {"harness": info.harness, "devices": info.devices}
    load: dict[str, Any] = {"model_id": info.id, "harness": info.harness}
    if info.quant is not None:
        config["quant"] = load["quant"] = info.quant
    if info.devices:
        load["devices"] = info.devices
    ranks = info.tensor_parallel or len(info.devices)
    if ranks > 1:
        config["tensor_parallel"] = load["tensor_parallel"] = ranks
    return ServedModel(
        Model(info.id, config),
        frozenset(info.capabilities or ["text"]),
        info.limit.context if info.limit else None,
        info.tool_call,
        load,
    )


def _parsed(kind: type[RecordT], value: object, endpoint: str) -> RecordT:
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise TargetError(f"{endpoint}: {kind.__name__.lower()}.{where}: {first['msg']}") from None
