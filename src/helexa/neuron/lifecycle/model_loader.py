"""Load one model: find its files, choose the engine's options, start the engine."""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from contextvars import Context
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from helexa.core.errors import HelexaError
from helexa.core.load_options import LoadOptions
from helexa.core.logs import quoted, tell
from helexa.core.model_source_ids import ModelSource, bare_id
from helexa.neuron.builtin_models import source_text
from helexa.neuron.engine.ipc.engine_options import EngineOptions, no_draft_model
from helexa.neuron.engine.ipc.messages import Progress
from helexa.neuron.engine_client.client import EngineClient
from helexa.neuron.engine_client.memory_grants import MemoryGrants
from helexa.neuron.engine_client.process_and_standby import Spawn, WarmStandby
from helexa.neuron.lifecycle.load_preparation import (
    check_heads,
    engine_options,
    load_time_quant,
    sees_images,
    text_of,
    vision_of,
)
from helexa.neuron.lifecycle.restart_and_sleep import HostedModel, RestartLimiter
from helexa.neuron.options import NodeOptions
from helexa.neuron.processes.file_locks_and_threads import FileThreads
from helexa.neuron.sources.fetch_and_errors import ProgressReport
from helexa.neuron.sources.hubs_and_sources import Sources

if TYPE_CHECKING:  # imported at run time only where needed: in servers, or while an engine loads
    from helexa.neuron.config import NeuronConfig
    from helexa.neuron.grammar import GrammarChecker
    from helexa.neuron.host_group import Membership
    from helexa.neuron.text.model_text import ModelText
    from helexa.neuron.vision.model_vision import ModelVision

log = logging.getLogger(__name__)

_FILE_THREADS = 16


class ModelLoader:
    """Loads the models of a registry. The registry decides which loads may run.

    Args:
        make_room: puts another model to sleep, to free memory for a model that wakes.
        any_sleeps: returns whether a model sleeps that may wake again.
        events: counts engine crashes, sleeps and wakes.
    """

    def __init__(
        self,
        config: "NodeOptions | NeuronConfig",
        sources: Sources,
        *,
        device: str,
        group: "Membership | None",
        spawn: Spawn,
        clock: Callable[[], float],
        sleep: Callable[[float], Awaitable[None]],
        make_room: Callable[[HostedModel], Awaitable[bool]],
        any_sleeps: Callable[[], bool],
        events: Counter[str],
    ) -> None:
        self._harness = config.harness.torch
        limits = self._harness.context_limit
        # Records how much memory each engine was granted, and how much is free.
        self.memory = MemoryGrants((limits.activation_headroom_mb + limits.min_free_floor_mb) << 20)
        self._grammars: GrammarChecker | None = None
        self._templates = {bare_id(model.model_id): model.chat_template for model in config.default_models}
        self._recovery = config.recovery
        self._files = FileThreads(_FILE_THREADS, config.recovery.load_timeout_secs)
        self._sources = sources
        self._device = device
        self._group = group
        # While any model sleeps, an engine process without a model waits. The next wake or load takes this process, and
        # need not start one.
        self._standby = WarmStandby(spawn)
        self._replacements: set[asyncio.Task[None]] = set()  # calls of `keep_standby` after the start of an engine
        self._clock = clock
        self._sleep = sleep
        self._make_room = make_room
        self._any_sleeps = any_sleeps
        self._events = events

    def source(self, spec: LoadOptions) -> ModelSource:
        """Return the parsed source id of the model that a load request names."""
        return ModelSource.parse(source_text(spec), self._harness.default_source)

    def options(self, spec: LoadOptions) -> EngineOptions:
        """Return the options of the engine (see `engine_options`)."""
        group_hosts = 1 if self._group is None else self._group.settings.hosts
        return engine_options(spec, self._harness, self._device, group_hosts)

    async def load(
        self,
        model_id: str,
        spec: LoadOptions,
        source: ModelSource,
        options: EngineOptions,
        report: ProgressReport,
    ) -> HostedModel:
        """Load a model, downloaded if necessary and allowed; return it with its engine."""
        begun = self._clock()
        log.info(
            "loading model=%s source=%s device=%s",
            quoted(model_id),
            quoted(source),
            ",".join(options.devices) or options.device,
        )
        quant = source.quant(spec.quant)
        path = await self._sources.resolve(source, quant=quant, progress=report, download=spec.download is not False)
        options = msgspec.structs.replace(options, quant=load_time_quant(model_id, path, quant), model_id=model_id)
        if spec.draft_model is not None:
            draft = await self._draft(spec.draft_model, options, report, download=spec.download is not False)
            options = msgspec.structs.replace(options, draft_model=str(draft))
        await self._files.run(check_heads, path, options.tensor_parallel)
        report("tokenizer", 0, 0)
        options = msgspec.structs.replace(options, images=await self._files.run(sees_images, path, options))
        resident = self._resident(model_id, spec, path, options)
        model = await resident.open(lambda progress: report(progress.stage, progress.done, progress.total))
        ready = model.engine.ready
        tell(
            log,
            logging.INFO,
            "loaded",
            model=model_id,
            seconds=round(self._clock() - begun, 1),
            type=ready.model_type,
            device=ready.device,
            dtype=ready.dtype,
            quant=ready.quant or "none",
            kernels=ready.kernels,
            context=ready.context_length,
            pages=ready.kv_pages,
            weights_mb=ready.weight_bytes >> 20,
            kv_mb=ready.kv_bytes >> 20,
            state_mb=ready.state_bytes >> 20,
            memory_mb=ready.memory_bytes >> 20,
        )
        return resident

    async def _draft(self, name: str, options: EngineOptions, report: ProgressReport, *, download: bool) -> Path:
        """Return the file or folder of a draft model, downloaded if necessary."""
        if reason := no_draft_model(options):  # checked before the download of a model that could not be used
            raise HelexaError(f"draft_model '{name}' cannot be used: {reason}; load the model without draft_model")
        source = self.source(LoadOptions(model_id=name))
        return await self._sources.resolve(source, quant=source.quant(None), progress=report, download=download)

    def _resident(self, model_id: str, spec: LoadOptions, path: Path, options: EngineOptions) -> HostedModel:
        async def texts() -> "tuple[ModelText, ModelVision | None]":
            text = await self._files.run(text_of, path, spec, self._templates.get(model_id))
            return text, await self._files.run(vision_of, path, text, options) if options.images else None

        async def launch(
            on_progress: Callable[[Progress], None] | None, on_exit: Callable[[str], None], least_pages: int
        ) -> EngineClient:
            def died(reason: str) -> None:
                self._events["engine_deaths"] += 1
                on_exit(reason)

            hosts = options.pipeline_parallel
            group = None if self._group is None or hosts == 1 else await self._group.host_group(hosts)
            try:
                return await EngineClient.start(
                    path,
                    options,
                    spawn=self._standby.take,
                    load_seconds=self._recovery.load_timeout_secs,
                    step_seconds=self._recovery.step_timeout_secs,
                    memory=self.memory,
                    on_progress=on_progress,
                    on_exit=died,
                    group=group,
                    least_pages=least_pages,
                )
            finally:
                self._replace_standby()

        def count(event: Literal["sleeps", "wakes"]) -> None:
            self._events[event] += 1

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
            prepare_wake=self.keep_standby,
            count=count,
        )

    async def keep_standby(self) -> None:
        """Start a standby process if any model sleeps, but not on a GPU; else end it."""
        # No standby on a GPU: a process that has imported torch and opened a GPU takes hundreds of megabytes of memory.
        if self._device.startswith("cuda") or not self._any_sleeps():
            await self._standby.close()
            return
        with suppress(HelexaError, OSError):  # an error is harmless: without a standby process, a wake takes longer
            await self._standby.begin()

    def _replace_standby(self) -> None:
        """Call `keep_standby` soon, after the start of an engine."""
        # The call runs in a task, after the caller has changed the model's status. At this point, a model that has just
        # woken still has the status `sleeping`. The standby process starts only after the engine, because the two
        # starts would compete for the CPU.
        task = asyncio.create_task(self.keep_standby(), context=Context())
        self._replacements.add(task)
        task.add_done_callback(self._replacements.discard)

    def _grammar_checker(self) -> "GrammarChecker":
        if self._grammars is None:
            from helexa.neuron.grammar import GrammarChecker

            self._grammars = GrammarChecker()
        return self._grammars

    async def aclose(self) -> None:
        """End the standby engine process and the process that checks grammars."""
        await asyncio.gather(*self._replacements)
        await self._standby.close()
        if self._grammars is not None:
            await self._grammars.aclose()
