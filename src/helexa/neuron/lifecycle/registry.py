"""The registry of this node's models: loads, unloads and finds them by id."""

import asyncio
import copy
import difflib
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

from helexa.core.errors import ApiError, HelexaError, model_not_found, service_unavailable, shutting_down
from helexa.core.load_options import LoadOptions
from helexa.core.logs import quoted
from helexa.core.model_source_ids import bare_id
from helexa.neuron.engine_client.process_and_standby import Child, Spawn
from helexa.neuron.lifecycle.load_preparation import check_tool_parser
from helexa.neuron.lifecycle.model_loader import ModelLoader
from helexa.neuron.lifecycle.restart_and_sleep import SAVE_SECONDS, HostedModel
from helexa.neuron.options import NodeOptions
from helexa.neuron.processes import heaps_and_shared_memory
from helexa.neuron.sources.fetch_and_errors import ProgressReport
from helexa.neuron.sources.hubs_and_sources import Sources

if TYPE_CHECKING:  # imported at run time only where needed: in servers, or while an engine loads
    from helexa.core.node_reports import FailedLoad, ModelInfo
    from helexa.neuron.config import NeuronConfig
    from helexa.neuron.host_group import Membership
    from helexa.neuron.lifecycle.served_model_and_context_limit import ServedModel

log = logging.getLogger(__name__)

T = TypeVar("T")

_CLOSE_SECONDS = 20.0
_GIVE_BACK_SECONDS = 2.0
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
        """Create an empty registry.

        Args:
            group: the hosts that compute models together with this node; None if the node has no host group.
        """
        # Ids of default models that are not loaded yet. Requests for them get a 503 (loading) instead of a 404.
        self.awaited: set[str] = set()
        # Number of loads, failed loads, unloads, engine crashes, sleeps and wakes since the node's start.
        self.events: Counter[str] = Counter(
            dict.fromkeys(("loads", "failed_loads", "unloads", "engine_deaths", "sleeps", "wakes"), 0)
        )
        self.draining = False  # True once the registry rejects all new requests, because the node shuts down
        self._loader = ModelLoader(
            config,
            sources,
            device=device,
            group=group,
            spawn=spawn,
            clock=clock,
            sleep=sleep,
            make_room=self._make_room,
            any_sleeps=self._any_sleeps,
            events=self.events,
        )
        self.memory = self._loader.memory  # records how much memory each engine was granted, and how much is free
        self._admission = config.harness.torch.admission
        self._device = device
        self._clock = clock
        self._residents: dict[str, HostedModel] = {}
        self._busy: dict[str, asyncio.Task[Any]] = {}
        self._loads: set[asyncio.Task[ServedModel]] = set()
        self._arriving: dict[str, tuple[str, float | None]] = {}  # model id -> stage and completed share of its load
        self._closing: asyncio.Task[None] | None = None

    async def load(self, spec: LoadOptions, on_progress: ProgressReport | None = None) -> "ServedModel":
        """Load a model and return it; loads of one id run one at a time.

        A quarantined model (status `poisoned`) with the same id is replaced. A sleeping model wakes with the options of
        its last load, except that `spec` may name other devices. If the caller is canceled, the load continues.
        `unload` and `close` cancel a load.

        Args:
            on_progress: called with the stage of the load (such as `download` or `weights`), the number of bytes done
                in this stage, and the total number of bytes of the stage (0: unknown).

        Raises:
            AlreadyLoadedError: the model is loaded or recovering.
            SourceError, ModelFileError, TensorParallelError, CudaUnavailableError, HelexaError: the load failed or was
                canceled. The message says why.
        """
        self._reject_while_draining()
        source = self._loader.source(spec)
        options = self._loader.options(spec)
        check_tool_parser(spec.tool_parser)
        model_id = bare_id(spec.model_id)
        await self._idle(model_id)
        if (known := self._residents.get(model_id)) is not None:
            if known.status == "sleeping" and not self._moves(known.spec, spec):
                await known.wake()
                return known.model
            if known.status not in ("poisoned", "sleeping"):
                raise AlreadyLoadedError(f"model '{model_id}' is already loaded; unload it first to change its options")
            del self._residents[model_id]  # the engine of a quarantined or sleeping model has ended
            if known.status == "sleeping":
                await self._exclusively(model_id, asyncio.create_task(known.close()))
                requested_devices, spec = spec.devices, copy.copy(known.spec)
                spec.devices = requested_devices
                source, options = self._loader.source(spec), self._loader.options(spec)

        def report(stage: str, done: int, total: int) -> None:
            if work.done():
                return  # a thread may report progress before it notices the end of the load
            share = round(done / total, 4) if total else None
            self._arriving[model_id] = stage, share
            if on_progress is not None:
                on_progress(stage, done, total)

        async def hosted() -> "ServedModel":
            self._residents[model_id] = await self._loader.load(model_id, spec, source, options, report)
            return self._residents[model_id].model

        work = asyncio.create_task(hosted())
        self._loads.add(work)

        def ended(work: "asyncio.Task[ServedModel]") -> None:
            self._loads.discard(work)
            self._arriving.pop(model_id, None)
            failed = work.cancelled() or work.exception() is not None
            if not work.cancelled():
                self.events["failed_loads" if failed else "loads"] += 1
            if failed:
                heaps_and_shared_memory.trim_heaps()
            else:  # run later, because trimming takes 20 ms and would delay the model's first request
                asyncio.get_running_loop().call_later(_GIVE_BACK_SECONDS, heaps_and_shared_memory.trim_heaps)

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
            if load.cancelled():  # if the load ended before the cancellation, the model is unloaded below
                log.info("load canceled model=%s", quoted(model_id))
                return
        await self._idle(model_id)
        resident = self._residents.pop(model_id, None)
        if resident is None:
            raise self._unknown(model_id)
        await self._exclusively(model_id, asyncio.create_task(resident.close(SAVE_SECONDS)))
        await self._loader.keep_standby()
        del resident
        heaps_and_shared_memory.trim_heaps()
        self.events["unloads"] += 1
        log.info("unloaded model=%s", quoted(model_id))

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
                f"model '{model_id}' is quarantined after repeated crashes: {resident.reason}; load the model again",
                retry_after=60,
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

    async def until_asleep(self, model_id: str) -> None:
        """Wait until a model that falls asleep has saved its prompts."""
        if (resident := self._residents.get(bare_id(model_id))) is not None:
            await resident.until_asleep()

    def keep(self, model_id: str, idle_unload_secs: float) -> None:
        """Change the idle time after which a model falls asleep.

        The change holds until the model is unloaded.

        Args:
            idle_unload_secs: seconds without requests; 0 for never.

        Raises:
            ApiError: the model was not found or is not ready, as in `get`.
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
        from helexa.core.node_reports import ModelInfo

        return [
            ModelInfo(id=model_id, status="loading", stage=stage, progress=share)
            for model_id, (stage, share) in self._arriving.items()
            if model_id not in self._residents
        ]

    def poisoned(self) -> "list[FailedLoad]":
        """Return the quarantined models (`poisoned`) with their last errors."""
        from helexa.core.node_reports import FailedLoad

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
        """Cancel loads and stop all engines, within about 20 seconds."""
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
        await self._loader.aclose()

    async def _make_room(self, waking: HostedModel) -> bool:
        """Put the model that was idle longest to sleep, to free memory for `waking`.

        If all other models have requests, wait until one is idle, at most `kv_max_wait_secs`. Return whether a model
        was put to sleep. A model whose `idle_unload_secs` is 0 is never put to sleep.
        """
        until = self._clock() + self._admission.kv_max_wait_secs
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
        heaps_and_shared_memory.trim_heaps()

    def _any_sleeps(self) -> bool:
        """Return whether a model sleeps that may wake again."""
        return not self.draining and any(resident.status == "sleeping" for resident in self._residents.values())

    def _moves(self, known: LoadOptions, spec: LoadOptions) -> bool:
        """Return whether a load request names other devices than the sleeping model had."""
        return self._device.startswith("cuda") and bool(spec.devices) and spec.devices != known.devices

    async def _idle(self, model_id: str) -> None:
        """Wait until no load or unload of `model_id` is running."""
        while task := self._busy.get(model_id):
            await asyncio.wait([task])
        self._reject_while_draining()

    async def _exclusively(self, model_id: str, work: "asyncio.Task[T]") -> T:
        """Return the result of the task `work`, which loads or unloads `model_id`.

        `work` continues even if the caller is canceled. If `work` itself is canceled, the method raises an `ApiError`.
        Other loads and unloads of `model_id` wait until `work` ends.
        """

        def on_done(work: "asyncio.Task[T]") -> None:
            del self._busy[model_id]
            if not work.cancelled() and (error := work.exception()):
                log.info(
                    "load or unload failed model=%s error=%s",
                    quoted(model_id),
                    quoted(f"{type(error).__name__}: {error}"),
                )

        self._busy[model_id] = work
        work.add_done_callback(on_done)
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            if work.cancelled():
                raise (shutting_down() if self.draining else _canceled(model_id)) from None
            raise

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
