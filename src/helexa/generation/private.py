"""Private engines, which the library starts for itself, without a server.

They use the same serving code as a node, without its HTTP API. The code runs in this process and in engine processes.
"""

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from helexa.core.errors import (
    ApiError,
    ConfigError,
    DoesNotFitError,
    HelexaError,
    not_installed,
    service_unavailable,
)
from helexa.core.load_options import LoadOptions
from helexa.core.logs import quoted
from helexa.core.model_source_ids import ModelSource, bare_id, typed_source
from helexa.generation import environment
from helexa.generation.completion import Delta, TokenLogprob, Usage
from helexa.generation.errors import ModelNotFoundError, generation_error
from helexa.generation.request import Request
from helexa.generation.target import End, Event, OnProgress, WasThought
from helexa.generation.tools import ToolCallDelta
from helexa.neuron.builtin_models import source_text
from helexa.neuron.cache_folder import default_prompts_mb
from helexa.neuron.engine_client.process_and_standby import Child, WarmStandby
from helexa.neuron.hardware.device_choice import device_for
from helexa.neuron.lifecycle.registry import AlreadyLoadedError, Registry
from helexa.neuron.options import NodeOptions
from helexa.neuron.output_events import (
    Failed,
    Finished,
    InferenceEvent,
    ReasoningDelta,
    TextDelta,
    ToolCallStart,
    WasReasoning,
)
from helexa.neuron.output_events import TokenLogprob as EngineLogprob
from helexa.neuron.output_events import ToolCallDelta as ArgumentsDelta
from helexa.neuron.sources.hubs_and_sources import Sources
from helexa.neuron.weights.gguf.files import part_names
from helexa.neuron.weights.quantization_formats import share_left

if TYPE_CHECKING:  # imported at run time only while an engine loads, or for values that need validation
    from helexa.core.wire.openai_chat import ChatRequest
    from helexa.neuron.config import NeuronConfig
    from helexa.neuron.lifecycle.served_model_and_context_limit import ServedModel

# This process checks the packages of the extra `neuron`, because other processes import them, and the errors of these
# processes would not name the extra.
if find_spec("tokenizers") is None:
    raise HelexaError(not_installed("tokenizers", "neuron"))

log = logging.getLogger(__name__)

_PRINCIPAL = "self"  # principal of all requests of this process, which share the prefix cache
_RETRY_SECONDS = 0.05
_NODE_VARIABLES = "NEURON_"  # prefix of the environment variables of nodes, as in `neuron.config`
_WAIT_SECONDS = 24 * 3600.0  # maximum time in the queue, behind other requests of this process
_DTYPES = {"fp32": "float32", "f32": "float32", "bf16": "bfloat16", "fp16": "float16", "f16": "float16"}


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Settings of a private engine.

    If a setting is None, its environment variable is read. If the variable is not set, the value in the node's
    configuration is used.

    Attributes:
        device: `cpu`, `cuda`, `cuda:N`, `mps` or `auto`.
        dtype: data type of activations: `float32`, `bfloat16`, `float16` or `auto`.
        context_length: maximum number of tokens of a conversation; 0 for the maximum of the model.
    """

    device: str | None = None
    dtype: str | None = None
    context_length: int | None = None

    def config(self) -> "NodeOptions | NeuronConfig":
        """Return the node's options with these settings.

        The queue of requests has almost no limit. The environment variables of nodes apply, too. If nothing is set, the
        defaults are returned without a validation by pydantic, which is slow to import.

        Raises:
            ConfigError: an option or an environment variable is invalid.
        """
        dtype = self.dtype or ("float32" if environment.flag(environment.FORCE_F32) else None)
        options = {
            "device": self.device or environment.text(environment.DEVICE),
            "dtype": _DTYPES.get(dtype, dtype) if dtype else None,
            "context_length": self.context_length,
        }
        changes = {name: value for name, value in options.items() if value not in (None, "")}
        is_default = not changes and not any(name.startswith(_NODE_VARIABLES) for name in os.environ)
        config = NodeOptions() if is_default else _validated(changes)
        torch = config.harness.torch
        if torch.prefix_disk_mb is None:
            torch.prefix_disk_mb = default_prompts_mb()
        torch.admission.max_queue_depth = 1 << 20
        torch.admission.max_wait_secs = torch.admission.kv_max_wait_secs = _WAIT_SECONDS
        return config


def _validated(changes: dict[str, Any]) -> "NeuronConfig":
    """Return the configuration from environment variables, changed by `changes`.

    Raises:
        ConfigError: an option or an environment variable is invalid.
    """
    from pydantic import ValidationError

    from helexa.neuron.config import TorchConfig, read_config

    config = read_config(None)
    try:
        config.harness.torch = TorchConfig.model_validate(config.harness.torch.model_dump() | changes)
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(f"{first['loc'][0]} cannot be '{first['input']}': {first['msg']}") from None
    return config


class PrivateEngines:
    """All private engines of this process with the same settings.

    Each engine runs one model.

    Args:
        standby: engine process that is already running when the first model is requested, because its start takes time.
            It loads the first model. If this load fails, the process is ended.
    """

    def __init__(self, settings: EngineSettings, standby: WarmStandby) -> None:
        self.standby = standby
        self._config = settings.config()
        self._sources = Sources(self._config, refresh=False)  # only `pull` checks the hub for updates
        self.holders: dict[str, set[object]] = {}  # model id -> objects that need the model to stay loaded
        self._registries: dict[str, Registry] = {}  # device -> registry of the models on this device
        self._imports: asyncio.Future[None] | None = None
        self._sources_by_id: dict[str, str] = {}  # model id -> source of the model

    def target(self, model: str, quant: str | None = None) -> "PrivateTarget":
        """Return an object that runs requests to a model in a private engine.

        The model is not loaded yet.

        Args:
            model: `org/name`, `scheme:name` or a path.
            quant: quantization of the model, or None.

        Raises:
            ModelNotFoundError: `model` is a path that does not exist.
            SourceError: `model` is neither a model id nor a path.
        """
        model = typed_source(model)
        spec = LoadOptions(model_id=model, quant=quant)
        source = ModelSource.parse(source_text(spec), self._config.harness.torch.default_source)
        if source.scheme == "file":
            path = Path(source.name).expanduser().absolute()
            if not path.exists():
                raise ModelNotFoundError(f"{path}: no such file; check the path, or name a model as org/name")
            source = ModelSource("file", str(path))
        spec.model_id = self._id(bare_id(model), f"{source} {quant or ''}")
        if spec.model_id != model:
            spec.source = str(source)
        return PrivateTarget(self, spec, source)

    async def registry_for(self, source: ModelSource, quant: str | None, on_progress: OnProgress) -> Registry:
        """Return the registry that loads models on the device for the model `source`.

        If the configured device is `auto`, the method downloads the model, and selects a device by the size of the
        model's weights.

        Raises:
            SourceError: the model could not be downloaded.
        """
        device = self._config.harness.torch.device
        if device == "auto":
            quant = source.quant(quant)
            path = await self._sources.resolve(source, quant=quant, progress=on_progress)
            choice = await asyncio.to_thread(lambda: device_for(_weight_bytes(path, quant)))
            log.info(
                "device chosen model=%s device=%s reason=%s",
                quoted(source),
                choice.device,
                quoted("; ".join((choice.reason, *choice.skipped))),
            )
            device = choice.device
        if device not in self._registries:
            self._registries[device] = Registry(self._config, self._sources, device=device, spawn=self._take)
        return self._registries[device]

    async def _take(self) -> Child:
        """Return an engine process that is ready to load a model.

        While the engine process loads the model, another thread of this process imports the modules that requests need.
        """
        child = await self.standby.take()
        if self._imports is None:
            self._imports = asyncio.get_running_loop().run_in_executor(None, _import_request_modules)
        return child

    async def make_room(self, registry: Registry) -> bool:
        """Unload one idle model to free memory. Return whether a model was unloaded.

        A model is idle if no request for it is running and no object from `helexa.load` uses it.
        """
        for model in registry.models():
            if not self.holders.get(model.id) and not model.engine.open_streams:
                log.info("unloading an idle model to make room model=%s", quoted(model.id))
                await registry.unload(model.id)
                return True
        return False

    async def close(self) -> None:
        """Unload all models and end the engine processes."""
        await asyncio.gather(*(registry.close() for registry in self._registries.values()))

    def _id(self, name: str, source: str) -> str:
        """Return a unique id for the model from `source`.

        The same source always gets the same id.

        The id is `name` if no other source has this id. Otherwise a number is appended.
        """
        number = 1
        unique_name = name
        while self._sources_by_id.setdefault(unique_name, source) != source:
            number += 1
            unique_name = f"{name}-{number}"
        return unique_name


async def fetch(model: str, quant: str | None, on_progress: OnProgress | None = None) -> Path:
    """Download a missing or outdated model for a private engine; return its path.

    Raises:
        SourceError: the download failed.
    """
    config = EngineSettings().config()
    spec = LoadOptions(model_id=typed_source(model))
    source = ModelSource.parse(source_text(spec), config.harness.torch.default_source)
    report = on_progress or (lambda *_: None)
    return await Sources(config).resolve(source, quant=source.quant(quant), progress=report)


class PrivateTarget:
    """One model in a private engine, which the library starts for itself.

    All callers in this process share it.
    """

    def __init__(self, engines: PrivateEngines, spec: LoadOptions, source: ModelSource) -> None:
        self._engines = engines
        self._spec = spec
        self._source = source
        self._registry: Registry | None = None
        self._loading = asyncio.Lock()
        self.model = spec.model_id

    @property
    def name(self) -> str:
        """Description of the engine for display; see `Target`."""
        model = self._served()
        return "private engine" + (f" on {model.engine.ready.device} in {model.engine.ready.dtype}" if model else "")

    @property
    def slow_reason(self) -> str | None:
        """Why a CPU runs the model without native kernels; see `Target`."""
        model = self._served()
        if model is None or model.engine.ready.device != "cpu" or model.engine.ready.kernels == "native":
            return None
        from helexa.neuron.ops.native.compilation import why_unavailable

        return why_unavailable()

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
        try:
            async with self._loading:
                try:
                    await self._load(report)
                except BaseException:
                    await self._engines.standby.close()
                    raise
        except BaseException:
            # Another object's `close` would otherwise wait for a holder that never closes.
            self._engines.holders.get(self.model, set()).discard(holder)
            raise

    async def run(self, request: Request) -> AsyncGenerator[Event, None]:
        """Run a request in the engine, and yield the events of the response; see `Target`."""
        from helexa.neuron.requests.inference import converse
        from helexa.neuron.requests.text_chat import TextChat

        try:
            model = self._required()
            body = {"max_tokens": model.context_length, **request.body(self.model)}
            events = await converse(model, TextChat.of(body) or _chat_request(body), _PRINCIPAL)
            async with aclosing(events):
                async for event in events:
                    if isinstance(event, Failed):
                        raise event.error
                    if (item := _library_event(event, model)) is not None:
                        yield item
        except ApiError as error:
            raise generation_error(error) from None

    async def embed(self, texts: Sequence[str]) -> list[list[float]]:
        """Return the embeddings of the texts; see `Target`."""
        from helexa.neuron.requests.embedding import embedded

        try:
            vectors, _ = await embedded(self._required(), texts, _PRINCIPAL, list)
        except ApiError as error:
            raise generation_error(error) from None
        return vectors

    async def close(self, holder: object) -> None:
        """Unload the model if only `holder` needed it; see `Target`."""
        holders = self._engines.holders.get(self.model, set())
        holders.discard(holder)
        if holders:
            return
        registry, self._registry = self._registry, None
        if registry is not None:
            with suppress(ApiError):  # the model is unloaded already
                await registry.unload(self.model)

    async def _load(self, report: OnProgress) -> None:
        while self._served() is None:
            if self._registry is None:
                self._registry = await self._engines.registry_for(self._source, self._spec.quant, report)
            try:
                await self._registry.load(self._spec, report)
            except AlreadyLoadedError:
                await asyncio.sleep(_RETRY_SECONDS)  # the model's engine has crashed, and is being restarted
            except DoesNotFitError:
                if not await self._engines.make_room(self._registry):
                    raise

    def _required(self) -> "ServedModel":
        if self._registry is None:
            raise service_unavailable(f"model '{self.model}' is not loaded; try again", retry_after=1)
        return self._registry.get(self.model)

    def _served(self) -> "ServedModel | None":
        try:
            return None if self._registry is None else self._registry.get(self.model)
        except ApiError:
            return None


def _import_request_modules() -> None:
    import helexa.neuron.requests.inference
    import helexa.neuron.requests.text_chat  # noqa: F401


def _chat_request(body: dict[str, Any]) -> "ChatRequest":
    from helexa.core.wire.openai_chat import ChatRequest  # needs pydantic, which is slow to import

    return ChatRequest.from_value(body)


def _weight_bytes(model: Path, quant: str | None) -> int:
    """Return the size in bytes of a model's weights.

    The weights are all shards of a GGUF file, or the safetensors files in a folder. If `model` is a folder and `quant`
    is not None, return the size that the weights will have after this quantization.
    """
    if model.is_dir():
        stored = sum(file.stat().st_size for file in model.iterdir() if file.suffix == ".safetensors")
        return int(stored * share_left(quant)) if quant else stored
    return sum(model.with_name(name).stat().st_size for name in part_names(model.name))


def _library_event(event: InferenceEvent, model: "ServedModel") -> Event | None:
    match event:
        case TextDelta(text, logprobs):
            return Delta(text, logprobs=tuple(map(_logprob, logprobs)))
        case ToolCallStart(index, id, name):
            return ToolCallDelta(index, id, name)
        case ArgumentsDelta(index, arguments):
            return ToolCallDelta(index, arguments=arguments)
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


def _logprob(entry: EngineLogprob) -> TokenLogprob:
    top = tuple(TokenLogprob(token, logprob, tuple(spelled)) for token, spelled, logprob in entry.top)
    return TokenLogprob(entry.token, entry.logprob, tuple(entry.bytes), top)
