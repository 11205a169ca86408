"""Polls nodes of kind `openai`, such as vLLM, llama.cpp and Ollama.

The gateway never loads or unloads models on these nodes. A node is up if `GET /v1/models` succeeds, and all listed
models count as loaded. When a model first appears in the list, the gateway detects which server the node runs, and
reads the endpoints that only this server has.
"""

import asyncio
import re
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import Field, TypeAdapter

from helexa.core.node_reports import Health, Limit, ModelId, ModelInfo, ModelLoad, Record, WireInt
from helexa.cortex.fleet.fleet_view import Node, Report
from helexa.cortex.fleet.node_client import MAX_MODELS, NodeClient, or_none, parse

_MAX_SHOW_REQUESTS = 64
_PARALLEL_REQUESTS = 4
_OLLAMA_KINDS = {"completion": "text", "vision": "vision", "embedding": "embedding"}
_STUDIO_KINDS = {"llm": ["text"], "vlm": ["text", "vision"], "embeddings": ["embedding"]}


class _Entry(Record):
    """A model in `GET /v1/models`, with the fields of vLLM and llama.cpp."""

    id: ModelId
    owned_by: str | None = None
    max_model_len: WireInt | None = None
    meta: dict[str, Any] | None = None


class _Props(Record):
    """The fields that the gateway reads from the response to llama.cpp's `GET /props`."""

    default_generation_settings: dict[str, Any] = Field(default_factory=dict[str, Any])
    modalities: dict[str, Any] = Field(default_factory=dict[str, Any])


class _Running(Record):
    """A model in memory, as listed in the response to Ollama's `GET /api/ps`."""

    name: str
    context_length: WireInt | None = None


class _Ps(Record):
    models: list[_Running]


class _Show(Record):
    """The details of a model in the response to Ollama's `POST /api/show`."""

    model_info: dict[str, Any] = Field(default_factory=dict[str, Any])
    capabilities: list[str] = Field(default_factory=list[str])


class _Studio(Record):
    """A model in the response to LM Studio's `GET /api/v0/models`."""

    id: str
    type: str | None = None
    loaded_context_length: WireInt | None = None
    max_context_length: WireInt | None = None
    capabilities: list[str] = Field(default_factory=list[str])


class _Studios(Record):
    data: list[_Studio]


class _Listing(Record):
    data: list[dict[str, Any]] | None


_entry = TypeAdapter(_Entry)
_listing = TypeAdapter(_Listing)
_props = TypeAdapter(_Props)
_ps = TypeAdapter(_Ps)
_show = TypeAdapter(_Show)
_studios = TypeAdapter(_Studios)
_vllm_count = re.compile(
    rb'^vllm:num_requests_(?:running|waiting)\{[^}\n]*\bmodel_name="([^"\n]*)"[^}\n]*\} (\d+)', re.MULTILINE
)

Known = Mapping[str, ModelInfo]


class OpenAINode:
    """Polls nodes of kind `openai`. Earlier results come from the polled `Node`."""

    def __init__(self, client: NodeClient) -> None:
        self._client = client

    async def poll(self, node: Node, bearer: str | None = None) -> Report:
        """Poll a node and return its models, and its running requests if known.

        Raises:
            NodeError: `GET /v1/models` failed.
        """
        return await _NodePoll(self._client, node, bearer).report()

    async def poll_load(self, node: Node, bearer: str | None = None) -> Report | None:
        """Return a report with the number of requests per model; None if unknown."""
        if not node.models or any(info.harness != "vllm" for info in node.models.values()):
            return None
        health = await or_none(_NodePoll(self._client, node, bearer).vllm_load, node.models)
        return None if health is None else Report(node.models, health)


class _NodePoll:
    """One poll of a node, which also detects the node's server program."""

    def __init__(self, client: NodeClient, node: Node, bearer: str | None) -> None:
        self._client = client
        self._node = node
        self._bearer = bearer

    async def report(self) -> Report:
        entries = _entries(parse(_listing, await self._get("/v1/models")))
        known: Known = self._node.models if self._node.healthy and not self._node.misses else {}
        # If one server program is known to serve all models, only the endpoints of this program are requested, because
        # nodes may be polled every second.
        harnesses = {known[name].harness if name in known else None for name in entries}
        harness = harnesses.pop() if len(harnesses) == 1 else None
        health = None
        if any(entry.max_model_len is not None for entry in entries.values()):  # only vLLM and SGLang send this field
            models = {name: _info(name, "vllm", _first_int(entry.max_model_len)) for name, entry in entries.items()}
            health = await or_none(self.vllm_load, entries)
        elif any(entry.owned_by == "llamacpp" for entry in entries.values()):
            models = await self._llamacpp(entries, known)
        else:
            detected = await self._ollama(entries, known) if harness in (None, "ollama") else None
            if detected is None and harness in (None, "lmstudio"):
                detected = await self._lm_studio(entries)
            models = (
                {name: known.get(name) or _info(name, "openai") for name in entries} if detected is None else detected
            )
        return Report(models, health)

    async def vllm_load(self, models: Iterable[str]) -> Health:
        """Return the number of requests of each model, from the metrics of vLLM or SGLang."""
        counts = dict.fromkeys(models, 0)
        for name, count in _vllm_count.findall(await self._get("/metrics")):
            model = name.decode("utf-8", "replace")
            if model in counts:
                # Both metrics, running and waiting requests, are added. At most 9 digits are read, because the response
                # is untrusted.
                counts[model] += int(count[:9])
        return Health(models=[ModelLoad(id=name, in_flight=count) for name, count in counts.items()])

    async def _llamacpp(self, entries: dict[str, _Entry], known: Known) -> dict[str, ModelInfo]:
        if known.keys() >= entries.keys():
            return {name: known[name] for name in entries}
        # `/props` describes only one model, so it is not used if the node lists several.
        props = await or_none(self._props) if len(entries) == 1 else None
        models = {}
        for name, entry in entries.items():
            meta = entry.meta or {}
            context_length = (props.default_generation_settings if props else {}).get("n_ctx")
            info = _info(name, "llamacpp", _first_int(context_length, meta.get("n_ctx"), meta.get("n_ctx_train")))
            if props is not None and props.modalities.get("vision") is True:
                info.capabilities = ["text", "vision"]
            models[name] = info
        return models

    async def _ollama(self, entries: dict[str, _Entry], known: Known) -> dict[str, ModelInfo] | None:
        """Return an Ollama server's models by id, or None for another server.

        Ollama truncates prompts to the context length that a model was loaded with, so the gateway uses this length
        instead of the model's maximum.
        """
        ps = await or_none(self._running)
        if ps is None:
            return None
        new_models = [name for name in entries if name not in known][:_MAX_SHOW_REQUESTS]
        limiter = asyncio.Semaphore(_PARALLEL_REQUESTS)

        async def show(name: str) -> _Show | None:
            async with limiter:
                return await or_none(self._show, name)

        details = dict(zip(new_models, await asyncio.gather(*(show(name) for name in new_models)), strict=True))
        in_memory = {running.name: running.context_length for running in ps.models}
        models = {}
        for name in entries:
            info = _ollama_info(name, details[name]) if name in details else known.get(name) or _info(name, "ollama")
            length = in_memory.get(name)
            models[name] = info.model_copy(update={"limit": Limit(context=length)}) if length else info
        return models

    async def _lm_studio(self, entries: dict[str, _Entry]) -> dict[str, ModelInfo] | None:
        """Return an LM Studio server's models by id, or None for another server."""
        listing = await or_none(self._studios)
        if listing is None:
            return None
        models = {name: _info(name, "lmstudio") for name in entries}
        for model in listing.data:
            if model.id in models:
                info = _info(model.id, "lmstudio", _first_int(model.loaded_context_length, model.max_context_length))
                info.capabilities = _STUDIO_KINDS.get(model.type or "", [])
                info.tool_call = "tool_use" in model.capabilities
                models[model.id] = info
        return models

    async def _props(self) -> _Props:
        return parse(_props, await self._get("/props"))

    async def _running(self) -> _Ps:
        return parse(_ps, await self._get("/api/ps"))

    async def _show(self, name: str) -> _Show:
        content = await self._client.post(self._node.endpoint, "/api/show", {"model": name}, self._bearer)
        return parse(_show, content)

    async def _studios(self) -> _Studios:
        return parse(_studios, await self._get("/api/v0/models"))

    async def _get(self, path: str) -> bytes:
        return await self._client.get(self._node.endpoint, path, self._bearer)


def _entries(listing: _Listing) -> dict[str, _Entry]:
    """Return the well-formed entries of a `/v1/models` response by model id."""
    entries: dict[str, _Entry] = {}
    for raw in (listing.data or [])[:MAX_MODELS]:
        try:
            entry = _entry.validate_python(raw)
        except ValueError:
            continue
        entries[entry.id] = entry
    return entries


def _info(name: str, harness: str, context: int | None = None) -> ModelInfo:
    return ModelInfo(id=name, harness=harness, limit=Limit(context=context) if context else None)


def _ollama_info(name: str, show: _Show | None) -> ModelInfo:
    if show is None:
        return _info(name, "ollama")
    lengths = [value for key, value in show.model_info.items() if key.endswith(".context_length")]
    info = _info(name, "ollama", _first_int(*lengths))
    if show.capabilities:
        info.capabilities = [_OLLAMA_KINDS[kind] for kind in show.capabilities if kind in _OLLAMA_KINDS]
        info.tool_call, info.reasoning = "tools" in show.capabilities, "thinking" in show.capabilities
    return info


def _first_int(*values: object) -> int | None:
    return next((value for value in values if type(value) is int and 0 < value < 2**63), None)
