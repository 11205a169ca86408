"""The registry of the models on this node. It loads and unloads models and finds them by id."""

import asyncio
import difflib
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from helexa.core.errors import ApiError, HelexaError, model_not_found, service_unavailable, shutting_down
from helexa.core.fleet import FailedLoad, ModelInfo, ModelSpec
from helexa.core.source import ModelSource
from helexa.neuron.builtin_models import recommended_sampling, source_text
from helexa.neuron.config import NeuronConfig
from helexa.neuron.engine.ipc.messages import EngineOptions, Progress
from helexa.neuron.engine_client.child import Child, Spawn
from helexa.neuron.engine_client.client import EngineClient
from helexa.neuron.engine_client.memory_grants import MemoryGrants
from helexa.neuron.engine_client.warm_standby import WarmStandby
from helexa.neuron.grammar import GrammarChecker
from helexa.neuron.hardware.discovery import discover
from helexa.neuron.host_group.membership import Membership, hosts_for
from helexa.neuron.lifecycle.hosted_model import HostedModel
from helexa.neuron.lifecycle.model import ServedModel
from helexa.neuron.lifecycle.rank_check import check_heads, devices_of_ranks
from helexa.neuron.lifecycle.recovery import RestartLimiter
from helexa.neuron.parsers.formats.choice import TOOL_CALL_FORMATS
from helexa.neuron.processes import heap
from helexa.neuron.sources.fetch import ProgressReport
from helexa.neuron.sources.sources import Sources
from helexa.neuron.text.model_text import ModelText
from helexa.neuron.weights.quantization.quant_form import has_more_bits, quant_named
from helexa.neuron.weights.vision.config import has_vision

if TYPE_CHECKING:
    from helexa.neuron.vision.model_vision import ModelVision

log = logging.getLogger(__name__)

T = TypeVar("T")

_HARNESSES = ("torch", "candle")
_NO_PARSER = "none"
_CLOSE_SECONDS = 20.0


class AlreadyLoadedError(HelexaError):
    """Error for a load request whose model is already loaded."""


class CudaUnavailableError(HelexaError):
    """A model needs a CUDA device, but the driver does not work."""


class Registry:
    """All models on this node. Loads and unloads models and finds them by id.

    Args:
        config: the node's configuration.
        sources: resolves model sources to local files, and downloads them if necessary.
        device: torch name of the device for load requests that name no device.
        group: the hosts that compute models together with this node; None if the node has no host group.
        spawn: starts an engine process.
        clock: function that returns monotonic time in seconds.
        sleep: waits before an engine is restarted.
    """

    def __init__(
        self,
        config: NeuronConfig,
        sources: Sources,
        *,
        device: str = "cpu",
        group: Membership | None = None,
        spawn: Spawn = Child.spawn,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.awaited: set[str] = set()
        """Ids of default models that are not loaded yet. Requests for them get a 503 (loading) instead of a 404."""
        self.events = Counter({"loads": 0, "failed_loads": 0, "unloads": 0, "engine_deaths": 0})
        """Number of loads, failed loads, unloads and engine crashes since the node's start."""
        self.draining = False
        """True once the registry rejects all new requests, because the node shuts down."""
        self._harness = config.harness.torch
        self._grammars = GrammarChecker()
        limits = self._harness.context_limit
        self.memory = MemoryGrants((limits.activation_headroom_mb + limits.min_free_floor_mb) << 20)
        """Records how much memory each engine was granted, and how much is free."""
        self._recovery = config.recovery
        self._sources = sources
        self._device = device
        self._group = group
        self._spawn = spawn
        self._clock = clock
        self._sleep = sleep
        self._residents: dict[str, HostedModel] = {}
        self._busy: dict[str, asyncio.Task[Any]] = {}
        self._loads: set[asyncio.Task[ServedModel]] = set()
        self._arriving: dict[str, ModelInfo] = {}
        self._closing: asyncio.Task[None] | None = None

    async def load(self, spec: ModelSpec, on_progress: ProgressReport | None = None) -> ServedModel:
        """Load a model and return it. Loads of the same id run one at a time, loads of different ids concurrently.

        A quarantined model (status `poisoned`) with the same id is replaced. If the caller is canceled, the load
        continues. Only `close` cancels a load.

        Args:
            spec: the load request.
            on_progress: called with the stage of the load (such as `download` or `weights`), the number of bytes done
                in this stage, and the total number of bytes of the stage (0: unknown).

        Raises:
            AlreadyLoadedError: the model is already loaded.
            SourceError, ModelFileError, TensorParallelError, CudaUnavailableError, HelexaError: the load failed. The
                message says why.
        """
        self._reject_while_draining()
        source = self._source(spec)
        options = self._options(spec)
        _check_tool_parser(spec.tool_parser)
        model_id = bare_id(spec.model_id)
        await self._idle(model_id)
        if (known := self._residents.get(model_id)) is not None:
            if known.status != "poisoned":
                raise AlreadyLoadedError(f"model '{model_id}' is already loaded")
            del self._residents[model_id]  # its last engine has ended

        def report(stage: str, done: int, total: int) -> None:
            if work.done():
                return  # a thread reported before it noticed the end
            share = round(done / total, 4) if total else None
            self._arriving[model_id] = ModelInfo(id=model_id, status="loading", stage=stage, progress=share)
            if on_progress is not None:
                on_progress(stage, done, total)

        work = asyncio.create_task(self._load(model_id, spec, source, options, report))
        self._loads.add(work)

        def ended(work: "asyncio.Task[ServedModel]") -> None:
            self._loads.discard(work)
            self._arriving.pop(model_id, None)
            if not work.cancelled():
                self.events["failed_loads" if work.exception() else "loads"] += 1
            heap.give_back()

        work.add_done_callback(ended)
        return await self._exclusively(model_id, work)

    async def unload(self, model_id: str) -> None:
        """Unload the model `model_id`. The model's memory is free when this method returns.

        Raises:
            ApiError: code `model_not_found`: the node has no such model.
        """
        model_id = bare_id(model_id)
        await self._idle(model_id)
        resident = self._residents.pop(model_id, None)
        if resident is None:
            raise self._unknown(model_id)
        await self._exclusively(model_id, asyncio.create_task(resident.close()))
        del resident
        heap.give_back()
        self.events["unloads"] += 1
        log.info("unloaded model=%s", model_id)

    def get(self, model_id: str) -> ServedModel:
        """Return the loaded model with the id `model_id`. The id may include its source scheme.

        Raises:
            ApiError: code `model_not_found`: the node has no such model. Status 503: the model is loading, recovering,
                quarantined or being unloaded, or the node is shutting down.
        """
        self._reject_while_draining()
        model_id = bare_id(model_id)
        resident = self._residents.get(model_id)
        if resident is None:
            work = self._busy.get(model_id)
            if work in self._loads or model_id in self.awaited:
                raise service_unavailable(f"model '{model_id}' is loading", retry_after=5)
            if work is not None:
                raise service_unavailable(f"model '{model_id}' is being unloaded", retry_after=5)
            raise self._unknown(model_id)
        if resident.status == "poisoned":
            raise service_unavailable(f"model '{model_id}' is poisoned: {resident.reason}", retry_after=60)
        if resident.status != "loaded":
            raise service_unavailable(f"model '{model_id}' is {resident.status}", retry_after=2)
        return resident.model

    def models(self) -> list[ServedModel]:
        """Return the models that can serve requests now."""
        return [resident.model for resident in self._residents.values() if resident.status == "loaded"]

    def infos(self) -> list[ModelInfo]:
        """Return the entries of `GET /models` for all loaded, recovering and quarantined models. Does not block."""
        return [resident.info() for resident in self._residents.values()]

    def loading(self) -> list[ModelInfo]:
        """Return the entries of `GET /models` for the models that are being loaded, with the progress of each load."""
        return [info for info in self._arriving.values() if info.id not in self._residents]

    def poisoned(self) -> list[FailedLoad]:
        """Return the ids of the quarantined models (status `poisoned`), each with the error of its last crash."""
        return [
            FailedLoad(model_id=model_id, error=resident.reason or "")
            for model_id, resident in self._residents.items()
            if resident.status == "poisoned"
        ]

    def drain(self) -> None:
        """Reject all new and waiting requests. Running requests continue, but crashed engines are not restarted."""
        self.draining = True
        for resident in self._residents.values():
            resident.retire()
            resident.model.admission.close(shutting_down())

    async def close(self) -> None:
        """Reject new requests, cancel all loads and stop all engine processes, within about `_CLOSE_SECONDS`."""
        self.drain()
        self._closing = self._closing or asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        for load in self._loads:
            load.cancel()
        tasks = list(self._busy.values())
        tasks += [asyncio.create_task(resident.close()) for resident in self._residents.values()]
        self._residents.clear()
        if tasks:
            await asyncio.wait(tasks, timeout=_CLOSE_SECONDS)
        await self._grammars.aclose()

    async def _load(
        self,
        model_id: str,
        spec: ModelSpec,
        source: ModelSource,
        options: EngineOptions,
        report: ProgressReport,
    ) -> ServedModel:
        begun = self._clock()
        log.info("loading model=%s source=%s device=%s", model_id, source, ",".join(options.devices) or options.device)
        quant = source.quant(spec.quant)
        path = await self._sources.resolve(source, quant=quant, progress=report)
        options = msgspec.structs.replace(options, quant=_load_time_quant(model_id, path, quant))
        await asyncio.to_thread(check_heads, path, options.tensor_parallel)
        report("tokenizer", 0, 0)
        async with WarmStandby(self._spawn) as standby:  # an engine process starts while the tokenizer is read
            text = await asyncio.to_thread(_text_of, path, spec)
            vision = await asyncio.to_thread(_vision_of, path, text, options)
            options = msgspec.structs.replace(options, images=vision is not None)
            resident = self._resident(model_id, spec, path, options, text, vision, standby.take)
            model = await resident.open(lambda progress: report(progress.stage, progress.done, progress.total))
        self._residents[model_id] = resident
        log.info("loaded model=%s in %.1f s, %s", model_id, self._clock() - begun, model.engine.ready)
        return model

    def _resident(
        self,
        model_id: str,
        spec: ModelSpec,
        path: Path,
        options: EngineOptions,
        text: ModelText,
        vision: "ModelVision | None",
        spawn: Spawn,
    ) -> HostedModel:
        async def launch(
            *, on_progress: Callable[[Progress], None] | None, on_exit: Callable[[str], None]
        ) -> EngineClient:
            def died(reason: str) -> None:
                self.events["engine_deaths"] += 1
                on_exit(reason)

            hosts = options.pipeline_parallel
            group = None if self._group is None or hosts == 1 else await self._group.host_group(hosts)
            return await EngineClient.start(
                path,
                options,
                spawn=spawn,
                load_seconds=self._recovery.load_timeout_secs,
                step_seconds=self._recovery.step_timeout_secs,
                memory=self.memory,
                on_progress=on_progress,
                on_exit=died,
                group=group,
            )

        return HostedModel(
            model_id,
            spec,
            text,
            launch,
            RestartLimiter(self._recovery.max_restarts, self._recovery.restart_window_secs),
            config=self._harness,
            grammars=self._grammars,
            vision=vision,
            clock=self._clock,
            sleep=self._sleep,
        )

    async def _idle(self, model_id: str) -> None:
        """Wait until no load or unload of `model_id` is running.

        Raises:
            ApiError: the node is shutting down.
        """
        while task := self._busy.get(model_id):
            await asyncio.wait([task])
        self._reject_while_draining()

    async def _exclusively(self, model_id: str, work: "asyncio.Task[T]") -> T:
        """Return the result of the task `work`, which loads or unloads `model_id`.

        `work` continues even if the caller is canceled. Other loads and unloads of `model_id` wait until `work` ends.
        """

        def on_done(work: "asyncio.Task[T]") -> None:
            del self._busy[model_id]
            if not work.cancelled() and (error := work.exception()):
                log.info("model=%s: %s: %s", model_id, type(error).__name__, error)

        self._busy[model_id] = work
        work.add_done_callback(on_done)
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            if work.cancelled():
                raise shutting_down() from None
            raise

    def _source(self, spec: ModelSpec) -> ModelSource:
        return ModelSource.parse(source_text(spec), self._harness.default_source)

    def _options(self, spec: ModelSpec) -> EngineOptions:
        if spec.harness not in _HARNESSES:
            raise HelexaError(f"unknown harness '{spec.harness}'; this node has 'torch'")
        devices = spec.devices or []
        # Gateways also send device indices to nodes without accelerators.
        chosen = f"cuda:{devices[0]}" if devices and self._device.startswith("cuda") else self._device
        if chosen.startswith("cuda") and (reason := discover().cuda_unavailable_reason):
            raise CudaUnavailableError(f"no model can run on {chosen}: {reason}")
        options = self._harness.engine_options(chosen)
        if spec.tensor_parallel is not None:
            options = msgspec.structs.replace(options, tensor_parallel=spec.tensor_parallel)
        if spec.max_image_tokens is not None:
            options = msgspec.structs.replace(options, max_image_tokens=spec.max_image_tokens)
        options = msgspec.structs.replace(options, mmproj=spec.mmproj or "")
        hosts = hosts_for(spec.pipeline_parallel or self._harness.pipeline_parallel, self._group)
        options = msgspec.structs.replace(options, pipeline_parallel=hosts)
        ranks = devices_of_ranks(options, devices, discover().devices)
        return msgspec.structs.replace(options, device=ranks[0], devices=ranks) if ranks else options

    def _reject_while_draining(self) -> None:
        if self.draining:
            raise shutting_down()

    def _unknown(self, model_id: str) -> ApiError:
        model_id = model_id[:200]  # the id may be as long as a request
        names = sorted(self._residents)
        near = difflib.get_close_matches(model_id, names, n=3, cutoff=0.4) or names[:5]
        return model_not_found(model_id, f"loaded models: {', '.join(near)}" if near else "no model is loaded")


def _text_of(path: Path, spec: ModelSpec) -> ModelText:
    """Read a model's tokenizer, chat template and output formats from its files.

    A tool-call parser in `spec` replaces the tool-call format that the files imply. Sampling parameters in `spec`
    replace those in the files.
    """
    text = ModelText.open(path)
    stated = {} if spec.sampling is None else spec.sampling.json_dict()
    text.sampling_defaults = {**recommended_sampling(spec), **text.sampling_defaults, **stated}
    if spec.tool_parser is not None:
        text.output_format.tool_call_format = TOOL_CALL_FORMATS.get(spec.tool_parser)
    _ = text.capabilities  # starts the template process, which would otherwise delay the first request
    return text


def _vision_of(path: Path, text: ModelText, options: EngineOptions) -> "ModelVision | None":
    """Return the object that prepares images for a model; None if the node cannot use images with the model."""
    mmproj = Path(options.mmproj) if options.mmproj else None
    if options.pipeline_parallel > 1 or not has_vision(path, mmproj):
        return None
    from helexa.neuron.vision.model_vision import ModelVision  # imports numpy and Pillow, which text models do not need

    return ModelVision.open(path, text.tokenizer, options.max_image_tokens, mmproj)


def _load_time_quant(model_id: str, path: Path, quant: str | None) -> str:
    """Return the name of the quantization that the engine applies when it loads the weights; empty for none.

    GGUF files are loaded unchanged, because they are already quantized.

    Args:
        model_id: id of the model, for the log.
        path: the model's file or folder.
        quant: quantization that the load request names; None or empty for none.
    """
    if not quant:
        return ""
    if path.suffix.lower() != ".gguf":
        name = quant_named(quant)
        if has_more_bits(quant):
            log.warning(
                "model=%s: quant '%s' loads as %s, because safetensors have no smaller format", model_id, quant, name
            )
        return name
    if quant.lower().replace("_", "") not in path.name.lower().replace("_", ""):
        log.warning(
            "model=%s: %s is used unchanged; quant '%s' applies only to safetensors", model_id, path.name, quant
        )
    return ""


def bare_id(text: str) -> str:
    """Return the model id that requests use: `text` without its source scheme, or the file name of a path.

    Examples: `huggingface:org/name` gives `org/name`, and `/models/tiny.gguf` gives `tiny`.
    """
    if text.startswith(("/", "./", "../", "~", "file:")):
        name = Path(text.removeprefix("file:")).name
        return name[:-5] if name.lower().endswith(".gguf") else name
    scheme, colon, name = text.partition(":")
    return name if colon and "/" not in scheme else text


def _check_tool_parser(name: str | None) -> None:
    if name is not None and name != _NO_PARSER and name not in TOOL_CALL_FORMATS:
        known = ", ".join([*TOOL_CALL_FORMATS, _NO_PARSER])
        raise HelexaError(f"unknown tool_parser '{name[:100]}'; known parsers: {known}")
