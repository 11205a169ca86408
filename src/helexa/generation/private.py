"""Private engines, which the library starts for itself, without a server.

They use the same serving code as a node, without its HTTP API. The code runs in this process and in engine processes.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from helexa.core.errors import ApiError, ConfigError, DoesNotFitError, service_unavailable
from helexa.core.fleet import ModelSpec
from helexa.core.source import ModelSource
from helexa.core.wire.openai_chat import ChatRequest
from helexa.generation import environment
from helexa.generation.completion import Delta, Usage
from helexa.generation.errors import ModelNotFoundError, generation_error
from helexa.generation.request import Request
from helexa.generation.target import End, Event, OnProgress, WasThought
from helexa.neuron.builtin_models import source_text
from helexa.neuron.config import NeuronConfig, TorchConfig, read_config
from helexa.neuron.engine_client.warm_standby import WarmStandby
from helexa.neuron.events import Failed, Finished, InferenceEvent, ReasoningDelta, TextDelta, WasReasoning
from helexa.neuron.hardware.device_choice import device_for
from helexa.neuron.lifecycle.model import ServedModel
from helexa.neuron.lifecycle.registry import AlreadyLoadedError, Registry, bare_id
from helexa.neuron.routes.chat import converse
from helexa.neuron.sources.sources import Sources
from helexa.neuron.weights.gguf.files import part_names
from helexa.neuron.weights.quantization.quant_form import share_left

log = logging.getLogger(__name__)

_PRINCIPAL = "self"  # the only principal of this process: all requests share the prefix cache
_RETRY_SECONDS = 0.05
_WAIT_SECONDS = 24 * 3600.0  # maximum time in the queue, behind other requests of this process
_DTYPES = {"fp32": "float32", "f32": "float32", "bf16": "bfloat16", "fp16": "float16", "f16": "float16"}


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Settings of a private engine, which the library starts for itself, without a server.

    If a setting is None, its environment variable is read. If the variable is not set, the value in the node's
    configuration is used.

    Attributes:
        device: `cpu`, `cuda`, `cuda:N`, `mps` or `auto`.
        dtype: data type of activations: `float32`, `bfloat16`, `float16` or `auto`.
        context_length: maximum number of tokens of a conversation; 0 for the model's own.
    """

    device: str | None = None
    dtype: str | None = None
    context_length: int | None = None

    def config(self) -> NeuronConfig:
        """Return a copy of the node configuration in which these settings replace the configured values.

        Raises:
            ConfigError: an option or an environment variable is invalid.
        """
        config = read_config(None)
        dtype = self.dtype or ("float32" if environment.flag(environment.FORCE_F32) else None)
        options = {
            "device": self.device or environment.text(environment.DEVICE),
            "dtype": _DTYPES.get(dtype, dtype) if dtype else None,
            "context_length": self.context_length,
        }
        changes = {name: value for name, value in options.items() if value not in (None, "")}
        try:
            torch = TorchConfig.model_validate(config.harness.torch.model_dump() | changes)
        except ValidationError as error:
            first = error.errors()[0]
            raise ConfigError(f"{first['loc'][0]} cannot be '{first['input']}': {first['msg']}") from None
        torch.admission.max_queue_depth = 1 << 20
        torch.admission.max_wait_secs = torch.admission.kv_max_wait_secs = _WAIT_SECONDS
        config.harness.torch = torch
        return config


class PrivateEngines:
    """All private engines of this process with the same settings. Each engine runs one model.

    Args:
        settings: settings of the engines.
        standby: engine process that is already running when the first model is requested, because its start takes time.
            It loads the first model. If this load fails, the process is ended.
    """

    def __init__(self, settings: EngineSettings, standby: WarmStandby) -> None:
        self.standby = standby
        self._config = settings.config()
        self._sources = Sources(self._config, refresh=False)  # only `pull` checks the hub for updates
        self.holders: dict[str, set[object]] = {}  # model id -> objects that need the model to stay loaded
        self._registries: dict[str, Registry] = {}  # by device
        self._sources_by_id: dict[str, str] = {}  # model id -> source of the model

    def target(self, model: str, quant: str | None = None) -> "PrivateTarget":
        """Return an object that runs requests to a model in a private engine. The model is not loaded yet.

        Args:
            model: `org/name`, `scheme:name` or a path.
            quant: quantization of the model, or None.
        """
        spec = ModelSpec(model_id=model, quant=quant)
        source = ModelSource.parse(source_text(spec), self._config.harness.torch.default_source)
        if source.scheme == "file":
            path = Path(source.name).expanduser().absolute()
            if not path.exists():
                raise ModelNotFoundError(f"{path}: no such file")
            source = ModelSource("file", str(path))
        spec.model_id = self._id(bare_id(model), f"{source} {quant or ''}")
        if spec.model_id != model:
            spec.source = str(source)
        return PrivateTarget(self, spec, source)

    async def registry_for(self, source: ModelSource, quant: str | None, on_progress: OnProgress) -> Registry:
        """Return the registry (the component that loads and unloads models) for the configured device.

        If the device is `auto`, the method first downloads the model. It then selects a device by the size of the
        model's weights.

        Raises:
            SourceError: the model could not be downloaded.
        """
        device = self._config.harness.torch.device
        if device == "auto":
            quant = source.quant(quant)
            path = await self._sources.resolve(source, quant=quant, progress=on_progress)
            choice = await asyncio.to_thread(lambda: device_for(_weight_bytes(path, quant)))
            log.info("%s", choice)
            device = choice.device
        if device not in self._registries:
            self._registries[device] = Registry(self._config, self._sources, device=device, spawn=self.standby.take)
        return self._registries[device]

    async def make_room(self, registry: Registry) -> bool:
        """Unload one idle model to free memory. Return whether a model was unloaded.

        A model is idle if no request for it is running and no object from `helexa.load` uses it.
        """
        for model in registry.models():
            if not self.holders.get(model.id) and not model.engine.open_streams:
                log.info("unloading an idle model to make room: model=%s", model.id)
                await registry.unload(model.id)
                return True
        return False

    async def close(self) -> None:
        """Unload all models and end the engine processes."""
        await asyncio.gather(*(registry.close() for registry in self._registries.values()))

    def _id(self, name: str, source: str) -> str:
        """Return a unique id for the model from `source`. The same source always gets the same id.

        The id is `name` if no other source has this id. Otherwise a number is appended.
        """
        number = 1
        unique_name = name
        while self._sources_by_id.setdefault(unique_name, source) != source:
            number += 1
            unique_name = f"{name}-{number}"
        return unique_name


async def fetch(model: str, quant: str | None, on_progress: OnProgress | None = None) -> Path:
    """Download a model if it is missing or outdated, and return the path of its file or folder.

    Raises:
        SourceError: the download failed.
    """
    config = EngineSettings().config()
    source = ModelSource.parse(source_text(ModelSpec(model_id=model)), config.harness.torch.default_source)
    report = on_progress or (lambda *_: None)
    return await Sources(config).resolve(source, quant=source.quant(quant), progress=report)


class PrivateTarget:
    """One model in a private engine, which the library starts for itself. All callers in this process share it."""

    def __init__(self, engines: PrivateEngines, spec: ModelSpec, source: ModelSource) -> None:
        self._engines = engines
        self._spec = spec
        self._source = source
        self._registry: Registry | None = None
        self._loading = asyncio.Lock()
        self.model = spec.model_id

    @property
    def name(self) -> str:
        """Description of the engine for display, with device and data type if the model is loaded; see `Target`."""
        model = self._served()
        return "private engine" + (f" on {model.engine.ready.device} in {model.engine.ready.dtype}" if model else "")

    @property
    def width(self) -> int:
        """Number of requests that should run concurrently; see `Target`."""
        model = self._served()
        return environment.number(environment.NUM_PARALLEL) or (model.engine.options.max_sequences if model else 1)

    async def open(self, on_progress: OnProgress | None = None, holder: object = None) -> None:
        """Load the model in its engine if it is not loaded; see `Target`."""
        if holder is not None:
            self._engines.holders.setdefault(self.model, set()).add(holder)
        if self._served() is not None:
            return
        report = on_progress or (lambda *_: None)
        async with self._loading:
            try:
                await self._load(report)
            except BaseException:
                await self._engines.standby.close()
                raise

    async def run(self, request: Request) -> AsyncGenerator[Event, None]:
        """Run a request in the engine, and yield the events of the response; see `Target`."""
        try:
            if self._registry is None:
                raise service_unavailable(f"model '{self.model}' is not loaded", retry_after=1)
            model = self._registry.get(self.model)
            body = {"max_tokens": model.context_length, **request.body(self.model)}
            events = await converse(model, ChatRequest.from_value(body), _PRINCIPAL)
            async with aclosing(events):
                async for event in events:
                    if isinstance(event, Failed):
                        raise event.error
                    if (item := _library_event(event, model)) is not None:
                        yield item
        except ApiError as error:
            raise generation_error(error) from None

    async def close(self, holder: object) -> None:
        """Unload the model, unless another object than `holder` still needs it; see `Target`."""
        holders = self._engines.holders.get(self.model, set())
        holders.discard(holder)
        if holders:
            return
        registry, self._registry = self._registry, None
        if registry is not None:
            with suppress(ApiError):  # already unloaded
                await registry.unload(self.model)

    async def _load(self, report: OnProgress) -> None:
        while self._served() is None:
            if self._registry is None:
                self._registry = await self._engines.registry_for(self._source, self._spec.quant, report)
            try:
                await self._registry.load(self._spec, report)
            except AlreadyLoadedError:
                await asyncio.sleep(_RETRY_SECONDS)  # the engine died and another load is in progress
            except DoesNotFitError:
                if not await self._engines.make_room(self._registry):
                    raise

    def _served(self) -> ServedModel | None:
        try:
            return None if self._registry is None else self._registry.get(self.model)
        except ApiError:
            return None


def _weight_bytes(model: Path, quant: str | None) -> int:
    """Return the size in bytes of a model's weights.

    The weights are all shards of a GGUF file, or the safetensors files in a folder. If `model` is a folder and `quant`
    is not None, return the size that the weights will have after this quantization.
    """
    if model.is_dir():
        stored = sum(file.stat().st_size for file in model.iterdir() if file.suffix == ".safetensors")
        return int(stored * share_left(quant)) if quant else stored
    return sum(model.with_name(name).stat().st_size for name in part_names(model.name))


def _library_event(event: InferenceEvent, model: ServedModel) -> Event | None:
    match event:
        case TextDelta(text):
            return Delta(text)
        case ReasoningDelta(text):
            return Delta(text, thought=True)
        case WasReasoning():
            return WasThought()
        case Finished():
            usage = Usage(
                prompt=event.prompt_tokens,
                cached=event.cached_tokens,
                completion=event.completion_tokens,
                reasoning=event.reasoning_tokens,
            )
            ready = model.engine.ready
            return End(
                reason=event.reason,
                model=model.id,
                usage=usage,
                prefill_s=event.prefill_ms / 1000,
                decode_s=event.decode_ms / 1000,
                device=ready.device,
                dtype=ready.dtype,
            )
    return None
