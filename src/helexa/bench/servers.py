"""Targets: helexa nodes, gateways, and servers with OpenAI's or Anthropic's API."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit

import aiohttp
from pydantic import BaseModel, ValidationError

from helexa.bench.client import Client, JsonCalls, RejectedParameters, TargetError
from helexa.bench.config import TargetSection
from helexa.bench.host_build_and_model import EXTERNAL, UNKNOWN, Build, Gpu, Host, Identity, Model, Target, TargetKind
from helexa.bench.prompts_and_load_generators import Clock
from helexa.bench.store.row_types import Reading
from helexa.bench.wire_formats import api_format_of
from helexa.core.node_reports import Discovery, Health, ModelInfo

ENGINE = "helexa"
RecordT = TypeVar("RecordT", bound=BaseModel)
_LOAD_SECS = 1800.0
_UNLOAD_SECS = 120.0
_NAMED_FACTS = {"git_sha", "git_sha_long", "git_dirty", "package_version", "build_timestamp"}


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that a target server has loaded."""

    model: Model  # name and configuration
    capabilities: frozenset[str] = frozenset({"text"})  # for example `text`, `vision`, `image`, `embedding`
    context: int | None = None  # context length in tokens, or None if unknown
    tool_call: bool = True  # False if the server reports that the model does not support tool calls
    # Body of a request that loads the model with its current settings. Empty if the server cannot load models.
    load: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def name(self) -> str:
        """The model's name, as used in requests."""
        return self.model.name


class TargetServer(Protocol):
    """A server to measure. All methods may raise `TargetError`."""

    @property
    def ignore_eos(self) -> bool:
        """True if the server supports the parameter `ignore_eos`.

        With this parameter, the server continues decoding after the end-of-sequence token.
        """
        ...

    async def identity(self) -> Identity:
        """Return the current host and build of the server."""
        ...

    async def models(self) -> list[ServedModel]:
        """Return the models that are loaded on the server."""
        ...

    async def readings(self, at_s: float) -> list[Reading]:
        """Return a reading of each accelerator, with `at_s` as its time.

        Empty if the server does not report readings.
        """
        ...


class NeuronTarget:
    """A helexa node, which can also load models and report requests in flight."""

    ignore_eos = True

    def __init__(self, calls: JsonCalls) -> None:
        self._calls = calls

    async def identity(self) -> Identity:
        """Return the build from `/version` and the hardware from `/discovery`.

        Of old nodes, which have no `/discovery`, only the host name is known.
        """
        version = await self._calls.get("/version")
        if not isinstance(version, dict):
            raise TargetError(
                f"{self._calls.endpoint}/version does not answer like a helexa node (neuron); correct the target's "
                "endpoint or kind"
            )
        payload = await self._calls.get_or_none("/discovery")
        discovery = None if payload is None else _parsed(Discovery, payload, self._calls.endpoint)
        return Identity(_host(discovery, self._calls.endpoint), _build_of(version))

    async def models(self) -> list[ServedModel]:
        """Return the models from `/models` that are loaded and accept requests."""
        entries = await self._calls.get("/models")
        if not isinstance(entries, list):
            raise TargetError(
                f"{self._calls.endpoint}/models does not answer like a helexa node (neuron); correct the target's "
                "endpoint or kind"
            )
        infos = [_parsed(ModelInfo, entry, self._calls.endpoint) for entry in entries if _is_loaded(entry)]
        return [_served_by_node(info) for info in infos if info.servable is None or info.servable.ok]

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
        """Load a model and wait until it accepts requests.

        `spec` is the body of the load request.
        """
        await self._calls.post("/models/load", dict(spec), _LOAD_SECS)

    async def _health(self) -> Health:
        return _parsed(Health, await self._calls.get("/health"), self._calls.endpoint)


def _build_of(version: Mapping[str, Any]) -> Build:
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


def _served_by_node(info: ModelInfo) -> ServedModel:
    """Convert a node's report about a loaded model to a `ServedModel`.

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
        raise TargetError(
            f"{endpoint} sent an invalid {kind.__name__.lower()}: {where}: {first['msg']}; "
            "update helexa-bench or the node"
        ) from None


_MAX_MODELS = 256
_MAX_VERSION_CHARS = 100


class OpenAITarget:
    """A server with OpenAI's or Anthropic's API format, or helexa's gateway (cortex).

    Of the server's hardware, only the host name is known. The build is identified by the engine and its version, which
    llama.cpp, vLLM and Ollama report. A new version is therefore measured as a new build.
    """

    def __init__(self, calls: JsonCalls, kind: TargetKind) -> None:
        self._calls = calls
        self._kind = kind
        self._engine = kind

    @property
    def ignore_eos(self) -> bool:
        """True if the server supports the parameter `ignore_eos`.

        Only valid after a call of `identity`.
        """
        return self._engine in ("cortex", "llama.cpp", "vllm")

    async def identity(self) -> Identity:
        """Return the host name, and the engine with its version if the server reports it."""
        host = Host(urlsplit(self._calls.endpoint).hostname or "")
        if self._kind == "cortex":
            document = await self._calls.get_or_none("/openapi.json")
            version = _field(document.get("info") if isinstance(document, dict) else None, "version")
            return Identity(host, Build("cortex", version or EXTERNAL, version=version))
        if self._kind == "anthropic":
            return Identity(host, Build("anthropic", EXTERNAL))
        for engine, path, key in _VERSIONS:
            version = _field(await self._calls.get_or_none(path), key)
            if version:
                self._engine = engine
                return Identity(host, Build(engine, version, version=version))
        self._engine = self._kind
        return Identity(host, Build(self._kind, EXTERNAL))

    async def models(self) -> list[ServedModel]:
        """Return the models in `/v1/models` (first 256) that are not marked as unloaded."""
        listing = await self._calls.get("/v1/models")
        data = listing.get("data") if isinstance(listing, dict) else None
        if not isinstance(data, list):
            raise TargetError(
                f"{self._calls.endpoint}/v1/models does not answer like an OpenAI server; correct the target's "
                "endpoint or kind"
            )
        entries = [entry for entry in data[:_MAX_MODELS] if isinstance(entry, dict) and _field(entry, "id")]
        return [_served_by_listing(entry) for entry in entries if entry.get("loaded", True) is True]

    async def readings(self, at_s: float) -> list[Reading]:
        """Return an empty list, because these servers do not report accelerator readings."""
        return []


_VERSIONS = (
    ("llama.cpp", "/props", "build_info"),
    ("ollama", "/api/version", "version"),
    ("vllm", "/version", "version"),
)


def _field(value: Any, key: str) -> str:
    text = value.get(key) if isinstance(value, dict) else None
    return text[:_MAX_VERSION_CHARS] if isinstance(text, str) else ""


def _served_by_listing(entry: dict[str, Any]) -> ServedModel:
    capabilities = entry.get("capabilities")
    context = entry.get("max_model_len")
    named = frozenset(map(str, capabilities)) if isinstance(capabilities, list) else frozenset[str]()
    tool_call = entry.get("tool_call", True)
    return ServedModel(
        Model(str(entry["id"])),
        named or frozenset({"text"}),
        context if isinstance(context, int) else None,
        tool_call is True,
    )


@dataclass(frozen=True, slots=True)
class Connection:
    """A target (server to measure), and the objects that communicate with the target."""

    target: Target  # name, kind and address of the target
    server: TargetServer  # object that reads the target's build, hardware, models and accelerator readings
    section: TargetSection  # the target's entry in the configuration
    session: aiohttp.ClientSession  # HTTP session for all requests
    # optional request parameters that the target's models have rejected
    rejected: RejectedParameters = field(default_factory=RejectedParameters)

    def client(self, timeout_secs: float, clock: Clock) -> Client:
        """Return a benchmark client that sends requests to the target.

        Call `server.identity` first: it finds out whether the server supports `ignore_eos`.

        Args:
            timeout_secs: longest duration of a request, in seconds.
            clock: source of the current time.
        """
        return Client(
            self.session,
            self.section.endpoint,
            api_format_of(self.section.kind),
            clock,
            _bearer(self.section),
            timeout_secs,
            self.server.ignore_eos,
            self.rejected,
        )

    @property
    def control(self) -> NeuronTarget | None:
        """The node, which can load and unload models.

        None if the target is another server.
        """
        return self.server if isinstance(self.server, NeuronTarget) else None


def connect(section: TargetSection, session: aiohttp.ClientSession) -> Connection:
    """Create the connection of a configured target. No request is sent yet."""
    calls = JsonCalls(session, section.endpoint, api_format_of(section.kind).headers(_bearer(section)))
    server = NeuronTarget(calls) if section.kind == "neuron" else OpenAITarget(calls, section.kind)
    return Connection(Target(section.name, section.kind, section.endpoint, section.label), server, section, session)


def _bearer(section: TargetSection) -> str | None:
    return section.bearer.get_secret_value() if section.bearer else None
