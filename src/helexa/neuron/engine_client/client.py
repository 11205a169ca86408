"""The server's client of one engine process: sends requests, returns token streams, and detects a crash or a hang."""

import asyncio
import itertools
import logging
import signal
from collections.abc import Callable, Sequence
from contextlib import aclosing, suppress
from contextvars import Context
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from helexa.core.errors import DoesNotFitError, HelexaError, ModelFileError, service_unavailable
from helexa.neuron.engine.ipc.frames import FrameDecoder, encode
from helexa.neuron.engine.ipc.messages import (
    Cancel,
    Embed,
    Embedding,
    EngineOptions,
    FromEngine,
    Generate,
    HostGroup,
    Load,
    LoadFailed,
    MemoryRequest,
    Pooling,
    Progress,
    PromptImage,
    Ready,
    SamplingParams,
    Shutdown,
    StepReport,
    ToEngine,
    TokenOutput,
)
from helexa.neuron.engine_client.child import Child, Spawn
from helexa.neuron.engine_client.idle_time import IdleTime
from helexa.neuron.engine_client.memory_grants import MemoryGrants
from helexa.neuron.engine_client.token_stream import TokenStream
from helexa.neuron.engine_client.watchdog import HangDetector
from helexa.neuron.vision.prompt.image_range import ImageRange

if TYPE_CHECKING:
    from helexa.neuron.vision.preprocessing.image_sandbox import SharedImage

log = logging.getLogger(__name__)

OVERLOADED = "overloaded"
"""Prefix of `TokenOutput.error` if the engine rejected the request because its waiting queue was full."""

_LOAD_ERRORS = {"model_file": ModelFileError, "does_not_fit": DoesNotFitError}
_ENDED = "the model was unloaded, or the node is shutting down"
_LOAD_SECONDS = 600.0
_STEP_SECONDS = 120.0
_READ_BYTES = 1 << 16


class EngineClient:
    """Client of one running engine process. `start` creates the client; it is usable until `close` or a crash.

    Attributes:
        ready: the engine's `Ready` message.
        options: the engine's options. After the load, `max_sequences` is the number of sequences for which the engine
            was granted memory.
        running, waiting: number of running and of waiting sequences in the engine's last `StepReport`.
        free_pages: number of free KV pages in the engine's last `StepReport`.
        prompt_tokens: number of prompt tokens of all sequences that the engine has started.
        cached_tokens: number of these prompt tokens that were found in the KV cache.
        encoded_images, reused_images: number of images that the vision tower has encoded, and of images whose
            embeddings were found in the cache of the encoder.
        refused: number of requests that the engine rejected because its waiting queue was full.
        reports: number of messages received from the engine.
    """

    ready: Ready

    def __init__(
        self,
        child: Child,
        options: EngineOptions,
        on_exit: Callable[[str], None] | None,
        memory: MemoryGrants,
    ) -> None:
        self.reports = 0
        self.options = options
        self.running = 0
        self.waiting = 0
        self.free_pages = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.encoded_images = 0
        self.reused_images = 0
        self.refused = 0
        self._child = child
        self._reader = child.reader
        self._writer = child.writer
        self._on_exit = on_exit
        self._memory = memory
        self._decoder = FrameDecoder(FromEngine)
        self._drain_lock = asyncio.Lock()
        self._ids = itertools.count(1)
        self._streams: dict[int, TokenStream] = {}
        self._expects_report = False  # a message was sent since the last report
        self._closing = False
        self._death: str | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._watchdog: asyncio.Task[None] | None = None

    @classmethod
    async def start(
        cls,
        model_path: Path,
        options: EngineOptions,
        *,
        on_progress: Callable[[Progress], None] | None = None,
        on_exit: Callable[[str], None] | None = None,
        spawn: Spawn = Child.spawn,
        load_seconds: float = _LOAD_SECONDS,
        step_seconds: float = _STEP_SECONDS,
        memory: MemoryGrants | None = None,
        group: HostGroup | None = None,
    ) -> "EngineClient":
        """Start an engine process and wait until its model is loaded.

        Args:
            on_progress: called in the event loop for every `Progress` message.
            on_exit: called once with the reason if the process ends although `close` was not called.
            spawn: function that starts the process.
            load_seconds: seconds without progress after which the server kills a loading engine, because it counts as
                hung.
            step_seconds: seconds without progress after which the server kills a working engine, because it counts as
                hung. In steps whose duration the engine can predict, the limit is usually shorter (see `HangDetector`).
            memory: grants the engine's memory requests; None for a new `MemoryGrants` that holds no memory in reserve.
            group: the other hosts that compute parts of the model; None if this host computes the whole model.

        Raises:
            DoesNotFitError: the model needs more memory than is free.
            ModelFileError: the file is corrupt or of an unsupported kind.
            HelexaError: loading failed for another reason; the message has one line.
        """
        client = cls(await spawn(), options, on_exit, memory or MemoryGrants())
        try:
            client._write(Load(str(model_path), options, step_seconds, group))
            client._watch_progress(load_seconds, lambda: True)
            await client._loaded(on_progress)
        except BaseException as error:
            client._stop_watching_progress()
            await asyncio.shield(client._end(grace=0.0))
            if isinstance(error, ValueError):
                raise HelexaError(f"the engine does not speak the protocol: {error}") from None
            raise
        client._stop_watching_progress()
        client._watcher = asyncio.create_task(client._watch(), context=Context())  # not the loading request's context
        client._watch_progress(step_seconds, lambda: bool(client._streams) or client._expects_report)
        return client

    @property
    def alive(self) -> bool:
        """Whether the engine accepts requests."""
        return self._death is None and not self._closing

    @property
    def pid(self) -> int:
        """Process id of the engine."""
        return self._child.pid

    @property
    def missing_bytes(self) -> int:
        """Granted bytes that the engine has not allocated and that other processes use. See `MemoryGrants.observe`."""
        return self._memory.missing(self._child.pid)

    @property
    def open_streams(self) -> int:
        """Number of requests that were sent to the engine and have not ended."""
        return len(self._streams)

    def generate(
        self,
        prompt: list[int],
        *,
        max_tokens: int,
        sampling: SamplingParams,
        stop_ids: Sequence[int] = (),
        salt: str = "",
        turn: int = 0,
        prior_output: int = 0,
        grammar: str = "",
        prompt_logprobs: int | None = None,
        reports_start: bool = False,
        traced: bool = False,
        gather: int = 1,
        images: "Sequence[SharedImage]" = (),
        image_ranges: Sequence[ImageRange] = (),
    ) -> TokenStream:
        """Return a stream of the tokens that the model generates after `prompt`.

        The request is sent when the stream is first awaited. `TokenStream` describes the argument `gather`. The message
        `Generate` describes the other arguments.

        Raises:
            ApiError: 503: the engine is not running.
        """
        self._require_alive()
        message = Generate(
            id=next(self._ids),
            prompt=prompt,
            max_tokens=max_tokens,
            sampling=sampling,
            stop_ids=list(stop_ids),
            salt=salt,
            turn=turn,
            prior_output=prior_output,
            grammar=grammar,
            prompt_logprobs=prompt_logprobs,
            reports_start=reports_start,
            traced=traced,
            images=[PromptImage(image.digest, image.layout) for image in images],
            image_ranges=list(image_ranges),
        )
        return TokenStream(self, message, gather, [image.pixels for image in images])

    async def embed(self, prompt: list[int], *, pooling: Pooling = "mean", salt: str = "") -> Embedding:
        """Return the embedding of `prompt`. If the computation fails, the `Embedding` contains the error.

        The message `Embed` describes the arguments. If the calling task is canceled, the engine drops the request.

        Raises:
            ApiError: 503: the engine is not running.
        """
        self._require_alive()
        message = Embed(id=next(self._ids), prompt=prompt, pooling=pooling, salt=salt)
        async with aclosing(TokenStream(self, message)) as outputs:
            output = await anext(outputs)
        return Embedding(id=message.id, vector=output.vector, error=output.error, retry=output.retry)

    async def close(self, grace: float = 5.0) -> None:
        """Send `Shutdown` to the engine. If its process still runs after `grace` seconds, end the process by signals.

        Unfinished token streams end with an error.
        """
        self._closing = True
        self._fail_streams(_ENDED)
        if self._child.alive:
            self._write(Shutdown())
        await self._end(grace)
        if self._watcher is not None:
            await self._watcher
        if self._watchdog is not None:
            await asyncio.wait([self._watchdog])

    async def submit(self, stream: TokenStream, message: Generate | Embed) -> None:
        """Send the request `message` to the engine, and register `stream` for its outputs.

        The method waits if the socket's write buffer is full. If the engine is not running, `stream` receives an error.
        Only `TokenStream` calls this method.
        """
        async with self._drain_lock:
            with suppress(ConnectionError):
                await self._writer.drain()
            if self.alive:
                await self._child.pixels.send(message.id, stream.pixels)
            if not self.alive:
                stream.put(TokenOutput(id=message.id, finish="error", error=self._death or _ENDED, retry=True))
                return
            self._streams[message.id] = stream
            self._write(message)

    def cancel(self, number: int) -> None:
        """Tell the engine to drop the request with id `number`, unless the request has ended.

        Only `TokenStream` calls this method.
        """
        if self._streams.pop(number, None) is not None and self.alive:
            self._write(Cancel(number))

    def _require_alive(self) -> None:
        if not self.alive:
            raise service_unavailable("the model's engine is not running; it may be restarting", retry_after=2)

    def _write(self, message: ToEngine) -> None:
        # One call writes one whole frame, so frames of concurrent writers never interleave.
        if not self._writer.is_closing():
            self._writer.write(encode(message))
            self._expects_report = self._expects_report or isinstance(message, Generate | Embed | Cancel)

    async def _loaded(self, on_progress: Callable[[Progress], None] | None) -> None:
        while data := await self._read():
            for message in self._decoder.feed(data):
                self.reports += 1
                match message:
                    case Progress():
                        self._memory.record_allocated(self._child.pid, message.taken)
                        if on_progress is not None:
                            on_progress(message)
                    case MemoryRequest():
                        self._write(self._memory.grant(self._child.pid, message))
                    case Ready():
                        self._memory.settle(self._child.pid)
                        max_sequences = message.max_sequences or self.options.max_sequences
                        self.options = msgspec.structs.replace(self.options, max_sequences=max_sequences)
                        self.ready = message
                        self.free_pages = message.kv_pages
                        return
                    case LoadFailed():
                        raise _LOAD_ERRORS.get(message.kind, HelexaError)(message.message)
                    case _:
                        raise HelexaError(f"the engine sent {type(message).__name__} before it was ready")
        await self._end(grace=2.0)
        raise HelexaError(f"{self._child.ending()} while loading the model")

    async def _read(self) -> bytes:
        """Return the next bytes from the engine's socket, or no bytes if the engine has closed the socket."""
        try:
            return await self._reader.read(_READ_BYTES)
        except ConnectionError:
            return b""

    async def _watch(self) -> None:
        try:
            while data := await self._read():
                for message in self._decoder.feed(data):
                    if isinstance(message, StepReport):
                        self._take(message)
        except (ValueError, msgspec.DecodeError) as error:
            log.error("engine %d does not speak the protocol: %s", self._child.pid, error)
        self._death = "the model's engine ended unexpectedly; it is being restarted"
        self._fail_streams(self._death)
        if self._closing:
            return
        await self._end(grace=2.0)
        reason = self._child.ending()
        log.error("engine %d: %s", self._child.pid, reason)
        if self._on_exit is not None and not self._closing:
            self._on_exit(reason)

    def _watch_progress(self, seconds: float, works: Callable[[], bool]) -> None:
        self._watchdog = asyncio.create_task(self._kill_when_hung(seconds, works), context=Context())

    def _stop_watching_progress(self) -> None:
        if self._watchdog is not None:
            self._watchdog.cancel()
            self._watchdog = None

    async def _kill_when_hung(self, seconds: float, works: Callable[[], bool]) -> None:
        """Kill the engine if `works` returns True, but the engine sends no message and makes no progress.

        Args:
            seconds: time limit. `HangDetector` describes when a shorter limit applies.
            works: function that returns whether the engine has work, so that progress is expected.
        """
        detector, idle_time = HangDetector(seconds), IdleTime(self._child.pid)
        while self._child.alive and not self._closing:
            await self._child.wait(detector.check_seconds)
            if not detector.is_silent(self.reports + self._child.progress, works()):
                idle_time.restart()
                continue
            expected_seconds = self._child.expected_step_seconds
            idle_seconds = idle_time.since_last_call(detector.check_seconds)
            if (limit := detector.hangs_after(expected_seconds, idle_seconds)) is not None:
                self._child.kill_reason = f"the engine made no progress for {limit:.3g} s and was killed"
                log.error("engine %d hangs; its stack traces follow", self._child.pid)
                await self._child.log_stacks()
                self._child.signal(signal.SIGKILL)
                return

    def _take(self, report: StepReport) -> None:
        self.reports += 1
        self._expects_report = False
        self.running, self.waiting, self.free_pages = report.running, report.waiting, report.free_pages
        self.prompt_tokens, self.cached_tokens = report.prompt_tokens, report.cached_tokens
        self.encoded_images, self.reused_images = report.encoded_images, report.reused_images
        for output in report.outputs:
            if output.finish is None:
                stream = self._streams.get(output.id)
            else:
                stream = self._streams.pop(output.id, None)
                self.refused += (output.error or "").startswith(OVERLOADED)
            if stream is not None:
                stream.put(output)

    def _fail_streams(self, error: str) -> None:
        streams, self._streams = self._streams, {}
        for number, stream in streams.items():
            stream.put(TokenOutput(id=number, finish="error", error=error, retry=True))

    async def _end(self, grace: float) -> None:
        await self._child.end(grace)
