"""A model of this node, and its engine: restarts after crashes, sleep and wake."""

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable
from contextvars import Context
from typing import TYPE_CHECKING, Literal

from helexa.core.errors import (
    MODEL_SLEEPING,
    ApiError,
    DoesNotFitError,
    HelexaError,
    ModelFileError,
    service_unavailable,
)
from helexa.core.load_options import LoadOptions
from helexa.core.logs import quoted
from helexa.neuron.engine.ipc.messages import Progress
from helexa.neuron.engine_client.client import EngineClient
from helexa.neuron.options import TorchOptions

if TYPE_CHECKING:  # imported at run time only where needed: in servers, or while an engine loads
    from helexa.core.node_reports import ModelInfo, ModelStatus
    from helexa.neuron.grammar import GrammarChecker
    from helexa.neuron.lifecycle.served_model_and_context_limit import ServedModel
    from helexa.neuron.text.model_text import ModelText
    from helexa.neuron.vision.model_vision import ModelVision


log = logging.getLogger(__name__)

SAVE_SECONDS = 10.0  # longest time for saving the prefix cache, before the engine ends
_LEAST_TEXT_SECONDS = 1.0  # shortest time for which a sleeping model keeps a tokenizer process
_EXIT_SECONDS = 3.0  # time after saving in which the engine must exit
# A waking model needs memory for this part of its former context length. If too little is free, other models are put
# to sleep.
_CONTEXT_PART = 0.9
_ROOM_SECONDS = 240.0  # longest time in which other models are put to sleep for the memory of this model
_ARRIVAL_SECONDS = 1.0  # if no request waits at the end of a wake, the model stays awake for at least this time
_RETRY_SECONDS = 5
_CALM_SECONDS = 30.0
_LONGEST_PAUSE_SECONDS = 30.0


class RestartLimiter:
    """Limits how often the engine of one model is restarted, to stop crash loops."""

    def __init__(self, most: int, window: float) -> None:
        self.most = most  # largest number of restarts within the last `window` seconds
        self.window = window  # length of the time window, in seconds
        self._times: deque[float] = deque(maxlen=max(most, 1))
        self._begun = -math.inf  # time at which the last restart was due
        self._quick = 0  # consecutive crashes shortly after a restart

    def next(self, now: float) -> float | None:
        """Record a restart at `now`; return the seconds to wait, or None: no restart.

        The result is None, and nothing is recorded, after `most` restarts within the time window. Otherwise, the wait
        is 0 if the engine ran for at least `_CALM_SECONDS` before it crashed. If it crashes sooner several times in a
        row, the waits are 1 s, 2 s, 4 s and so on, up to `_LONGEST_PAUSE_SECONDS`.
        """
        while self._times and now - self._times[0] > self.window:
            self._times.popleft()
        if len(self._times) >= self.most:
            return None
        self._quick = self._quick + 1 if now - self._begun < _CALM_SECONDS else 0
        pause = min(2.0 ** (self._quick - 1), _LONGEST_PAUSE_SECONDS) if self._quick else 0.0
        self._times.append(now)
        self._begun = now + pause
        return pause


Launch = Callable[[Callable[[Progress], None] | None, Callable[[str], None], int], Awaitable[EngineClient]]
"""Function that starts an engine with the model and returns its client.

The first two arguments are called with the progress of the load, and with the reason if the engine exits after the
load. The third argument is the smallest acceptable number of KV pages. With less free memory, the start fails with
`DoesNotFitError`.
"""


class HostedModel:
    """A model of this node, with the engine process that runs the model.

    `open` must succeed before other methods are called, because it sets `model`.

    Args:
        texts: awaitable that reads the text processing and the image preparation from the model's files. The image
            preparation is None if the model has no vision part. `open` awaits `texts` while the engine loads.
        idle_unload_secs: seconds without requests after which the model falls asleep; 0 for never.
        make_room: puts another model to sleep, to free memory for this model. Returns whether it put one to sleep.
        prepare_wake: called when the model has fallen asleep; starts work that makes its next wake faster.
        count: called with `sleeps` or `wakes` when the model falls asleep or is awake again.
    """

    model: "ServedModel"

    def __init__(
        self,
        model_id: str,
        spec: LoadOptions,
        texts: Awaitable["tuple[ModelText, ModelVision | None]"],
        launch: Launch,
        restarts: RestartLimiter,
        *,
        config: TorchOptions | None = None,
        grammars: "Callable[[], GrammarChecker] | None" = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        idle_unload_secs: float = 0.0,
        make_room: "Callable[[HostedModel], Awaitable[bool]] | None" = None,
        prepare_wake: Callable[[], Awaitable[None]] | None = None,
        count: Callable[[Literal["sleeps", "wakes"]], None] = lambda _event: None,
    ) -> None:
        # `loading` until `open` has started an engine, `loaded` if the model can serve requests, `recovering` while a
        # crashed engine is restarted, or `poisoned` (quarantined) after too many crashes. The engine of a quarantined
        # model is not restarted. `sleeping` from the end of an idle model's engine until its next engine has loaded.
        self.status: ModelStatus = "loading"
        # one line that says why the status is `recovering` or `poisoned`; None for other statuses
        self.reason: str | None = None
        self.spec = spec
        self.idle_unload_secs = idle_unload_secs
        # stage and completed share of a running wake, or None
        self.wake_progress: tuple[str, float | None] | None = None
        self._id = model_id
        self._texts = asyncio.ensure_future(texts)
        self._config = config
        self._grammars = grammars
        self._launch = launch
        self._restarts = restarts
        self._clock = clock
        self._sleep = sleep
        self._make_room = make_room
        self._prepare_wake = prepare_wake
        self._count = count
        self._recovery: asyncio.Task[None] | None = None
        self._idle_watch: asyncio.Task[None] | None = None
        self._falling_asleep: asyncio.Task[None] | None = None
        self._waking: asyncio.Task[None] | None = None
        self._waiting = 0  # number of requests that wait for the wake, or are about to be admitted after it
        self._for_request = False  # whether a request needs the running wake
        self._expected_until = -math.inf  # until this time, the model stays awake for an expected request
        self._closed = False

    async def open(self, on_progress: Callable[[Progress], None] | None = None) -> "ServedModel":
        """Start an engine, and return the object that serves requests.

        Raises:
            HelexaError: the engine did not start or could not load the model, or the model's text files are invalid.
                The message says why. Invalid text files are reported even if the engine fails, too.
        """
        loading = asyncio.ensure_future(self._launch(on_progress, self._on_death, 0))
        try:
            text, vision = await self._texts
            model_class = await asyncio.to_thread(_served_model)
            engine = await loading
        except BaseException:
            await _close_engine(loading)
            raise
        if not engine.alive:  # the engine has ended while the texts were read
            await engine.close()
            raise HelexaError(f"the engine of model '{self._id}' ended after the model was loaded; see the node's log")
        grammars = None if self._grammars is None else self._grammars()
        self.model = model_class(self._id, self.spec, text, engine, self._config, grammars=grammars, vision=vision)
        self.model.set_wake(self._expect_request, self._wait_until_awake)
        self.status, self.reason = "loaded", None
        self._watch_idle()
        return self.model

    def info(self) -> "ModelInfo":
        """Return the model's entry in `GET /models` without waiting for the engine."""
        from helexa.core.node_reports import Servable

        info = self.model.info(self.status)
        if self.status == "sleeping":
            info.servable = Servable(ok=True)
            info.stage, info.progress = self.wake_progress or (None, None)
        elif self.status != "loaded":
            info.servable = Servable(ok=False, reason=self.status, detail=self.reason)
        if self.status in ("poisoned", "sleeping"):
            info.vram_used_mb = info.granted_mb = None
        return info

    @property
    def idle_secs(self) -> float:
        """Seconds without requests; 0 if the model is not loaded or expects a request."""
        if self.status != "loaded" or self._waiting or self._clock() < self._expected_until:
            return 0.0
        return self.model.admission.idle_secs

    def set_idle_unload_secs(self, secs: float) -> None:
        """Let the model fall asleep after `secs` seconds without requests; 0: never."""
        self.idle_unload_secs = secs
        # The watch task also runs for a sleeping model: it ends the model's idle tokenizer process.
        if self.status in ("loaded", "sleeping"):
            self._watch_idle()

    def fall_asleep(self) -> "asyncio.Task[None]":
        """End the engine; return a task that ends when the memory is free.

        No request may run or wait. Later requests wake the model.
        """
        assert self.status == "loaded"
        self.status = "sleeping"
        self._count("sleeps")
        log.info("model falls asleep model=%s idle_secs=%.0f", quoted(self._id), self.model.admission.idle_secs)
        self._falling_asleep = asyncio.create_task(self._end_processes(), context=Context())
        return self._falling_asleep

    async def until_asleep(self) -> None:
        """Wait until the memory of the last engine is free, after `fall_asleep`."""
        if self._falling_asleep is not None:
            await asyncio.wait([self._falling_asleep])

    async def wake(self) -> None:
        """Wake the model for a load request, without putting other models to sleep.

        If the caller is canceled, the wake continues.

        Raises:
            HelexaError, OSError: the model could not wake, or it is being unloaded.
        """
        while self.status == "sleeping":
            await self._one_wake()

    def retire(self) -> None:
        """Disable restarts and wakes. Later exits of the engine do not count as crashes."""
        self._closed = True
        for task in (self._idle_watch, self._waking):
            if task is not None:
                task.cancel()

    async def close(self, save_secs: float = 2.0) -> None:
        """Stop the engine or its restart; return when its memory is free.

        Args:
            save_secs: longest time for saving the prefix cache to disk.
        """
        self.retire()
        self.model.reject_requests()  # including the requests that wait for the model to wake
        if self._recovery is not None:
            self._recovery.cancel()
        ending = [task for task in (self._recovery, self._waking, self._falling_asleep) if task is not None]
        if ending:
            await asyncio.wait(ending)
        await self.model.close(save_secs + _EXIT_SECONDS, save_secs)

    def _watch_idle(self) -> None:
        if self._idle_watch is not None:
            self._idle_watch.cancel()  # the old task may not have noticed yet that the model is awake
        if self.idle_unload_secs and not self._closed:
            self._idle_watch = asyncio.create_task(self._sleep_when_idle(), context=Context())

    async def _sleep_when_idle(self) -> None:
        while (rest := self.idle_unload_secs - self.idle_secs) > 0:
            await self._sleep(rest)
            if self.status != "loaded":
                break  # for example, the model was put to sleep for another model's memory, or by a client
        if self.status == "loaded":
            self.fall_asleep()
        while self.status == "sleeping":
            await self._sleep(max(self.idle_unload_secs, _LEAST_TEXT_SECONDS))
            # End the idle tokenizer process again: a request that only counts tokens has started it without a wake.
            if self.status == "sleeping" and self._waking is None:
                await asyncio.to_thread(self.model.text.end_process)

    def _expect_request(self) -> None:
        """Begin to wake the model for a request that is being prepared."""
        if self.status == "sleeping" and not self._closed:
            self._for_request = True
            self._begin_wake()

    async def _wait_until_awake(self) -> None:
        if self.status != "sleeping":
            return
        self._waiting += 1
        self._for_request = True
        try:
            while self.status == "sleeping":
                await self._one_wake()
        except ApiError:
            raise
        except (HelexaError, OSError) as error:
            raise ApiError(
                503,
                MODEL_SLEEPING if isinstance(error, DoesNotFitError) else "service_unavailable",
                f"model '{self._id}' slept and could not wake: {error}",
                type="api_error",
                retry_after=_RETRY_SECONDS,
            ) from None
        finally:
            self._waiting -= 1

    async def _one_wake(self) -> None:
        """Start a wake if none is running; wait for its end, and raise its error."""
        waking = self._begin_wake()
        await asyncio.wait([waking])
        if waking.cancelled():
            self.model.admission.require_open()
            raise service_unavailable(f"model '{self._id}' is being unloaded; retry in 5 s", _RETRY_SECONDS)
        if (error := waking.exception()) is not None:
            raise error.with_traceback(None)

    def _begin_wake(self) -> "asyncio.Task[None]":
        if self._waking is None:
            self.model.admission.require_open()  # closed if the model is being unloaded
            self._waking = asyncio.create_task(self._wake(), context=Context())
            self._waking.add_done_callback(lambda task: task.cancelled() or task.exception())  # `_wake` logs the error
        return self._waking

    async def _end_processes(self) -> None:
        await self.model.engine.close(SAVE_SECONDS + _EXIT_SECONDS, SAVE_SECONDS)
        await asyncio.to_thread(self.model.text.end_process)
        if self._prepare_wake is not None:
            await self._prepare_wake()

    async def _wake(self) -> None:
        begun = self._clock()
        try:
            await self.until_asleep()
            # The tokenizer process starts while the engine loads, because the waiting request needs both.
            asyncio.get_running_loop().run_in_executor(None, self.model.text.start_process)
            engine = await self._next_engine()
        except BaseException as error:
            fields = (quoted(self._id), quoted(error))
            log.warning(
                "model did not wake model=%s error=%s; the next request tries again, unless the model is quarantined",
                *fields,
            )
            raise
        finally:
            self._waking = self.wake_progress = None
            self._for_request = False
        self.model.replace_engine(engine)
        if not self._waiting:
            self._expected_until = self._clock() + _ARRIVAL_SECONDS
        self.status, self.reason = "loaded", None
        self._count("wakes")
        log.info("model is awake model=%s seconds=%.2f", quoted(self._id), self._clock() - begun)
        self._watch_idle()

    async def _next_engine(self) -> EngineClient:
        """Start a sleeping model's engine; after crashes, retry as `_restarts` permits."""

        def report(progress: Progress) -> None:
            share = round(progress.done / progress.total, 4) if progress.total else None
            self.wake_progress = progress.stage, share

        room_until = self._clock() + _ROOM_SECONDS
        before = self.model.engine.ready
        least_pages = min(before.kv_pages, int(_CONTEXT_PART * before.context_length / before.page_size))
        while True:
            try:
                engine = await self._launch(report, self._on_death, least_pages)
                if engine.alive:
                    return engine
                await engine.close(grace=0.0)
                raise HelexaError(
                    f"the engine of model '{self._id}' ended after the model was loaded; see the node's log"
                )
            except DoesNotFitError as error:
                # A wake for a load request puts no other model to sleep, because the gateway that sent the load request
                # chooses the models to unload.
                may_fit = self._for_request and not error.details.get("permanent") and self._clock() < room_until
                if may_fit and self._make_room is not None and await self._make_room(self):
                    continue
                if not least_pages:
                    raise
                least_pages = 0  # retry with any context length: a shorter context is better than a failed request
            except ModelFileError:
                raise
            except (HelexaError, OSError) as error:
                pause = self._restarts.next(self._clock())
                if pause is None:
                    self._quarantine(str(error))
                    raise
                fields = (quoted(self._id), pause, quoted(error))
                log.error("model did not wake and is tried again model=%s retry_secs=%.2f error=%s", *fields)
                await self._sleep(pause)

    def _on_death(self, reason: str) -> None:
        # In these two statuses, `open` or `_next_engine` is running, and raises the error itself.
        if self._closed or self.status in ("loading", "sleeping"):
            return
        log.error("engine exited and is restarted model=%s error=%s", quoted(self._id), quoted(reason))
        self.status, self.reason = "recovering", reason
        self.model.admission.close(
            service_unavailable(f"model '{self._id}' is recovering; retry in 2 s", retry_after=2)
        )
        self._recovery = asyncio.create_task(self._recover())

    async def _recover(self) -> None:
        """Restart the engine until it loads, or until the limit of restarts is reached."""
        while (pause := self._restarts.next(self._clock())) is not None:
            await self._sleep(pause)
            try:
                await self.open()
            except (HelexaError, OSError) as error:
                self.reason = str(error)
                fields = (quoted(self._id), quoted(error))
                log.error(
                    "engine did not restart model=%s error=%s; the node tries again until the model is quarantined",
                    *fields,
                )
                continue
            except Exception:
                self.reason = "internal error; see the node's log"
                log.exception(
                    "engine did not restart model=%s; the node tries again until the model is quarantined",
                    quoted(self._id),
                )
                continue
            log.warning("model recovered model=%s", quoted(self._id))
            return
        self._quarantine(self.reason)

    def _quarantine(self, error: str | None) -> None:
        count, window = self._restarts.most, self._restarts.window
        self.reason = f"{count} restarts within {window:.0f} s failed; last error: {error}"
        self.status = "poisoned"
        log.error(
            "model quarantined until a client loads or unloads the model model=%s error=%s",
            *(quoted(self._id), quoted(self.reason)),
        )


def _served_model() -> "type[ServedModel]":
    """Import and return `ServedModel`. The slow import runs while the engine loads."""
    from helexa.neuron.lifecycle.served_model_and_context_limit import ServedModel

    return ServedModel


async def _close_engine(loading: "asyncio.Future[EngineClient]") -> None:
    """Cancel the start of an engine, or close the engine if it has started."""
    loading.cancel()
    await asyncio.wait([loading])
    if not loading.cancelled() and loading.exception() is None:
        await loading.result().close(grace=0.0)
