"""The registry of this node's models: loads, unloads and finds them by id."""

import asyncio
import copy
import difflib
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import msgspec

from helexa.core.errors import ApiError, HelexaError, model_not_found, service_unavailable, shutting_down
from helexa.core.load_options import LoadOptions
from helexa.core.model_names import ModelSource, bare_id
from helexa.neuron.builtin_models import source_text
from helexa.neuron.engine.ipc.engine_options import EngineOptions, no_draft_model
from helexa.neuron.engine.ipc.messages import Progress
from helexa.neuron.engine_client.client import EngineClient
from helexa.neuron.engine_client.memory_grants import MemoryGrants
from helexa.neuron.engine_client.process import Child, Spawn, WarmStandby
from helexa.neuron.lifecycle.load_preparation import (
    check_heads,
    check_tool_parser,
    engine_options,
    load_time_quant,
    sees_images,
    text_of,
    vision_of,
)
from helexa.neuron.lifecycle.restart_and_sleep import SAVE_SECONDS, HostedModel, RestartLimiter
from helexa.neuron.options import NodeOptions
from helexa.neuron.processes import memory
from helexa.neuron.processes.file_threads import FileThreads
from helexa.neuron.sources.fetch import ProgressReport
from helexa.neuron.sources.sources import Sources

if TYPE_CHECKING:  # modules that are imported while an engine loads, or by servers alone
    from helexa.core.fleet import FailedLoad, ModelInfo
    from helexa.neuron.config import NeuronConfig
    from helexa.neuron.grammar import GrammarChecker
    from helexa.neuron.host_group import Membership
    from helexa.neuron.lifecycle.served_model import ServedModel
    from helexa.neuron.text.model_text import ModelText
    from helexa.neuron.vision.model_vision import ModelVision

log = logging.getLogger(__name__)

T = TypeVar("T")

_CLOSE_SECONDS = 20.0
_GIVE_BACK_SECONDS = 2.0
_FILE_THREADS = 16
_LOOK_SECONDS = 0.05  # interval of checks whether another model is idle


class AlreadyLoadedError(HelexaError):
    """Error for a load request whose model is already loaded."""


class Registry:
    """All models on this node. Loads and unloads models and finds them by id."""

    def __init__(
        self,
        config: "NodeOptions | NeuronConfig",
        sources: Sources,
        *,
        device: str = "cpu",
        group: "Membership | None" = None,
        spawn: Spawn = Child.spawn,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        # Ids of default models that are not loaded yet. Requests for them get a 503 (loading) instead of a 404.
        self.awaited: set[str] = set()
        # Number of loads, failed loads, unloads, engine crashes, sleeps and wakes since the node's start.
        self.events: Counter[str] = Counter(
            dict.fromkeys(("loads", "failed_loads", "unloads", "engine_deaths", "sleeps", "wakes"), 0)
        )
        self.draining = False  # True once the registry rejects all new requests, because the node shuts down
        self._harness = config.harness.torch
        self._grammars: GrammarChecker | None = None
        limits = self._harness.context_limit
        # Records how much memory each engine was granted, and how much is free.
        self.memory = MemoryGrants((limits.activation_headroom_mb + limits.min_free_floor_mb) << 20)
        self._templates = {bare_id(model.model_id): model.chat_template for model in config.default_models}
        self._recovery = config.recovery
        self._files = FileThreads(_FILE_THREADS, config.recovery.load_timeout_secs)
        self._sources = sources
        self._device = device
        self._group = group  # the hosts that compute models together with this node; None if the node has no host group
        self._spawn = spawn
        self._clock = clock
        self._sleep = sleep
        self._residents: dict[str, HostedModel] = {}
        self._busy: dict[str, asyncio.Task[Any]] = {}
        self._loads: set[asyncio.Task[ServedModel]] = set()
        self._arriving: dict[str, tuple[str, float | None]] = {}  # model id -> stage and completed share of its load
        self._closing: asyncio.Task[None] | None = None

    async def load(self, spec: LoadOptions, on_progress: ProgressReport | None = None) -> "ServedModel":
        """Load a model and return it; loads of one id run one at a time.

        A quarantined model (status `poisoned`) with the same id is replaced. A sleeping model wakes with the options of
        its last load, except that `spec` may name other devices. If the caller is canceled, the load
        continues. `unload` and `close` cancel a load.

        Args:
            on_progress: called with the stage of the load (such as `download` or `weights`), the number of bytes done
                in this stage, and the total number of bytes of the stage (0: unknown).

        Raises:
            SourceError, ModelFileError, TensorParallelError, CudaUnavailableError, HelexaError: the load failed. The
                message says why.
        """
        self._reject_while_draining()
        source = self._source(spec)
        options = self._options(spec)
        check_tool_parser(spec.tool_parser)
        model_id = bare_id(spec.model_id)
        await self._idle(model_id)
        if (known := self._residents.get(model_id)) is not None:
            if known.status == "sleeping" and not self._moves(known.spec, spec):
                await known.wake()
                return known.model
            if known.status not in ("poisoned", "sleeping"):
                raise AlreadyLoadedError(f"model '{model_id}' is already loaded; unload it first to change its options")
            del self._residents[model_id]  # its last engine has ended
            if known.status == "sleeping":
                await self._exclusively(model_id, asyncio.create_task(known.close()))
                requested_devices, spec = spec.devices, copy.copy(known.spec)
                spec.devices = requested_devices
                source, options = self._source(spec), self._options(spec)

        def report(stage: str, done: int, total: int) -> None:
            if work.done():
                return  # a thread reported before it noticed the end
            share = round(done / total, 4) if total else None
            self._arriving[model_id] = stage, share
            if on_progress is not None:
                on_progress(stage, done, total)

        work = asyncio.create_task(self._load(model_id, spec, source, options, report))
        self._loads.add(work)

        def ended(work: "asyncio.Task[ServedModel]") -> None:
            self._loads.discard(work)
            self._arriving.pop(model_id, None)
            failed = work.cancelled() or work.exception() is not None
            if not work.cancelled():
                self.events["failed_loads" if failed else "loads"] += 1
            if failed:
                memory.trim_heaps()
            else:  # later, because it would delay the first request by 20 ms
                asyncio.get_running_loop().call_later(_GIVE_BACK_SECONDS, memory.trim_heaps)

        work.add_done_callback(ended)
        return await self._exclusively(model_id, work)

    async def unload(self, model_id: str) -> None:
        """Unload `model_id` or cancel its load; return when its memory is free.

        Raises:
            ApiError: code `model_not_found`: the node has no such model.
        """
        model_id = bare_id(model_id)
        if (load := self._busy.get(model_id)) in self._loads:
            load.cancel()
            await asyncio.wait([load])
            if load.cancelled():  # otherwise the load has just ended
                log.info("canceled load model=%s", model_id)
                return
        await self._idle(model_id)
        resident = self._residents.pop(model_id, None)
        if resident is None:
            raise self._unknown(model_id)
        await self._exclusively(model_id, asyncio.create_task(resident.close(SAVE_SECONDS)))
        del resident
        memory.trim_heaps()
        self.events["unloads"] += 1
        log.info("unloaded model=%s", model_id)

    def get(self, model_id: str) -> "ServedModel":
        """Return the loaded or sleeping model with an id or source id.

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
                raise service_unavailable(f"model '{model_id}' is loading; retry in 5 s", retry_after=5)
            if work is not None:
                raise service_unavailable(f"model '{model_id}' is being unloaded; retry in 5 s", retry_after=5)
            raise self._unknown(model_id)
        if resident.status == "poisoned":
            raise service_unavailable(
                f"model '{model_id}' is quarantined: {resident.reason}; load it again", retry_after=60
            )
        if resident.status not in ("loaded", "sleeping"):
            raise service_unavailable(f"model '{model_id}' is {resident.status}; retry in 2 s", retry_after=2)
        return resident.model

    async def sleep(self, model_id: str) -> None:
        """Put an idle model to sleep; return when its memory is free.

        A model that sleeps already stays asleep.

        Raises:
            ApiError: code `model_not_found`: the node has no such model. 409: requests run. 503: the model is loading,
                recovering or quarantined.
        """
        model = self.get(model_id)
        resident = self._residents[model.id]
        if resident.status == "loaded" and resident.idle_secs <= 0:
            raise ApiError(409, "model_busy", f"model '{model.id}' has running requests; retry when they have ended")
        await self._asleep(resident)

    def keep(self, model_id: str, idle_unload_secs: float) -> None:
        """Change the idle time after which a model falls asleep, until it is unloaded.

        Args:
            idle_unload_secs: seconds without requests; 0 for never.

        Raises:
            ApiError: as `get`.
        """
        self._residents[self.get(model_id).id].set_idle_unload_secs(idle_unload_secs)

    def models(self) -> "list[ServedModel]":
        """Return the models that can serve requests now."""
        return [resident.model for resident in self._residents.values() if resident.status == "loaded"]

    def infos(self) -> "list[ModelInfo]":
        """Return the `GET /models` entries of loaded, sleeping and crashed models."""
        return [resident.info() for resident in self._residents.values()]

    def loading(self) -> "list[ModelInfo]":
        """Return the `GET /models` entries of running loads, with their progress."""
        from helexa.core.fleet import ModelInfo

        return [
            ModelInfo(id=model_id, status="loading", stage=stage, progress=share)
            for model_id, (stage, share) in self._arriving.items()
            if model_id not in self._residents
        ]

    def poisoned(self) -> "list[FailedLoad]":
        """Return the quarantined models (`poisoned`) with their last errors."""
        from helexa.core.fleet import FailedLoad

        return [
            FailedLoad(model_id=model_id, error=resident.reason or "")
            for model_id, resident in self._residents.items()
            if resident.status == "poisoned"
        ]

    def drain(self) -> None:
        """Reject all new and waiting requests, and restart no engines."""
        self.draining = True
        for resident in self._residents.values():
            resident.retire()
            resident.model.admission.close(shutting_down())

    async def close(self) -> None:
        """Cancel loads and stop all engines within about `_CLOSE_SECONDS`."""
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
        if self._grammars is not None:
            await self._grammars.aclose()

    async def _load(
        self,
        model_id: str,
        spec: LoadOptions,
        source: ModelSource,
        options: EngineOptions,
        report: ProgressReport,
    ) -> "ServedModel":
        begun = self._clock()
        log.info("loading model=%s source=%s device=%s", model_id, source, ",".join(options.devices) or options.device)
        quant = source.quant(spec.quant)
        path = await self._sources.resolve(source, quant=quant, progress=report, download=spec.download is not False)
        options = msgspec.structs.replace(options, quant=load_time_quant(model_id, path, quant), model_id=model_id)
        if spec.draft_model is not None:
            draft = await self._draft(spec.draft_model, options, report, download=spec.download is not False)
            options = msgspec.structs.replace(options, draft_model=str(draft))
        await self._files.run(check_heads, path, options.tensor_parallel)
        report("tokenizer", 0, 0)
        options = msgspec.structs.replace(options, images=await self._files.run(sees_images, path, options))
        async with WarmStandby(self._spawn) as standby:
            resident = self._resident(model_id, spec, path, options, standby.take)
            model = await resident.open(lambda progress: report(progress.stage, progress.done, progress.total))
        self._residents[model_id] = resident
        log.info("loaded model=%s in %.1f s, %s", model_id, self._clock() - begun, model.engine.ready)
        return model

    async def _draft(self, name: str, options: EngineOptions, report: ProgressReport, *, download: bool) -> Path:
        """Return the file or folder of a draft model, downloaded if necessary."""
        if reason := no_draft_model(options):  # before a download that would be of no use
            raise HelexaError(f"draft_model '{name}' cannot be used: {reason}; load the model without draft_model")
        source = self._source(LoadOptions(model_id=name))
        return await self._sources.resolve(source, quant=source.quant(None), progress=report, download=download)

    def _resident(
        self,
        model_id: str,
        spec: LoadOptions,
        path: Path,
        options: EngineOptions,
        spawn: Spawn,
    ) -> HostedModel:
        async def texts() -> "tuple[ModelText, ModelVision | None]":
            text = await self._files.run(text_of, path, spec, self._templates.get(model_id))
            return text, await self._files.run(vision_of, path, text, options) if options.images else None

        async def launch(
            on_progress: Callable[[Progress], None] | None, on_exit: Callable[[str], None], least_pages: int
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
                least_pages=least_pages,
            )

        def count(event: Literal["sleeps", "wakes"]) -> None:
            self.events[event] += 1

        return HostedModel(
            model_id,
            spec,
            texts(),
            launch,
            RestartLimiter(self._recovery.max_restarts, self._recovery.restart_window_secs),
            config=self._harness,
            grammars=self._grammar_checker,
            clock=self._clock,
            sleep=self._sleep,
            idle_unload_secs=(
                self._harness.idle_unload_secs if spec.idle_unload_secs is None else spec.idle_unload_secs
            ),
            make_room=self._make_room,
            count=count,
        )

    async def _make_room(self, waking: HostedModel) -> bool:
        """Put the model that was idle longest to sleep, for the memory of `waking`.

        If all models have requests, wait until one is idle. Return False if there is none, or after
        `kv_max_wait_secs`. Models that never sleep by themselves are left alone.
        """
        until = self._clock() + self._harness.admission.kv_max_wait_secs
        while others := [
            resident
            for resident in self._residents.values()
            if resident is not waking and resident.idle_unload_secs and resident.status == "loaded"
        ]:
            longest_idle = max(others, key=lambda resident: resident.idle_secs)
            if longest_idle.idle_secs > 0:
                await self._asleep(longest_idle)
                return True
            if self._clock() > until:
                break
            await asyncio.sleep(_LOOK_SECONDS)
        return False

    async def _asleep(self, resident: HostedModel) -> None:
        """Put an idle model to sleep; return when its memory is free."""
        if resident.status == "loaded":
            resident.fall_asleep()
        await resident.until_asleep()
        memory.trim_heaps()

    def _moves(self, known: LoadOptions, spec: LoadOptions) -> bool:
        """Return whether a load request names other devices than the sleeping model had."""
        return self._device.startswith("cuda") and bool(spec.devices) and spec.devices != known.devices

    def _grammar_checker(self) -> "GrammarChecker":
        if self._grammars is None:
            from helexa.neuron.grammar import GrammarChecker

            self._grammars = GrammarChecker()
        return self._grammars

    async def _idle(self, model_id: str) -> None:
        """Wait until no load or unload of `model_id` is running."""
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
                raise (shutting_down() if self.draining else _canceled(model_id)) from None
            raise

    def _source(self, spec: LoadOptions) -> ModelSource:
        return ModelSource.parse(source_text(spec), self._harness.default_source)

    def _options(self, spec: LoadOptions) -> EngineOptions:
        group_hosts = 1 if self._group is None else self._group.settings.hosts
        return engine_options(spec, self._harness, self._device, group_hosts)

    def _reject_while_draining(self) -> None:
        if self.draining:
            raise shutting_down()

    def _unknown(self, model_id: str) -> ApiError:
        model_id = model_id[:200]  # the id may be as long as a request
        names = sorted(self._residents)
        near = difflib.get_close_matches(model_id, names, n=3, cutoff=0.4) or names[:5]
        return model_not_found(model_id, f"loaded models: {', '.join(near)}" if near else "no model is loaded")


def _canceled(model_id: str) -> ApiError:
    message = f"the load of model '{model_id}' was canceled by an unload; load it again"
    return ApiError(409, "load_canceled", message, type="api_error")
