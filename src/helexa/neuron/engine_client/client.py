"""The server's client of one engine process: requests, tokens, crashes."""

import asyncio
import itertools
import logging
from collections.abc import Callable, Sequence
from contextlib import aclosing, suppress
from contextvars import Context
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from helexa.core.errors import DoesNotFitError, HelexaError, ModelFileError, service_unavailable
from helexa.core.logs import quoted
from helexa.neuron.engine.ipc.engine_options import EngineOptions
from helexa.neuron.engine.ipc.message_and_pixel_sockets import FrameDecoder, encode
from helexa.neuron.engine.ipc.messages import (
    CachedPrefixes,
    Cancel,
    ClearPrefixes,
    DiskUse,
    Drafts,
    Embed,
    Embedding,
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
from helexa.neuron.engine_client.memory_grants import MemoryGrants
from helexa.neuron.engine_client.process_and_standby import Child, Spawn
from helexa.neuron.engine_client.token_stream import TokenStream
from helexa.neuron.engine_client.watchdog import kill_when_hung
from helexa.neuron.vision.image_tokens_and_errors import ImageRange

if TYPE_CHECKING:
    from helexa.neuron.vision.model_vision import SharedImage


log = logging.getLogger(__name__)

OVERLOADED = "overloaded"  # prefix of `TokenOutput.error` if the engine's waiting queue was full

_LOAD_ERRORS: dict[str, Callable[[str], HelexaError]] = {
    "model_file": partial(ModelFileError, advice=""),  # the message contains the advice
    "does_not_fit": DoesNotFitError,
}
_ENDED = "the model was unloaded, or the node is shutting down"
_LOAD_SECONDS = 600.0
_STEP_SECONDS = 120.0
_CLEAR_SECS = 60.0
_READ_BYTES = 1 << 16


class EngineClient:
    """Client of one engine process, from `start` until `close` or a crash."""

    ready: Ready

    def __init__(
        self,
        child: Child,
        options: EngineOptions,
        on_exit: Callable[[str], None] | None,
        memory: MemoryGrants,
        least_pages: int = 0,
    ) -> None:
        self.reports = 0  # number of messages that the engine has sent
        # The engine's options. After the load, `max_sequences` is the number of sequences for which the engine was
        # granted memory.
        self.options = options
        # number of running and of waiting sequences in the engine's last `StepReport`
        self.running = 0
        self.waiting = 0
        self.free_pages = 0
        self.prompt_tokens = 0  # number of prompt tokens of all sequences that the engine has started
        self.cached_tokens = 0  # number of these prompt tokens that were found in the KV cache
        self.cached_prompts = 0  # number of started prompts whose beginning was found in the KV cache
        self.disk = DiskUse()
        self.prefixes = CachedPrefixes()
        self._clears, self._cleared = 0, 0  # numbers of sent and of handled `ClearPrefixes` messages
        self._cleared_more = asyncio.Event()
        # number of images that the vision tower has encoded, and of images whose embeddings were found in the cache of
        # the encoder
        self.encoded_images = 0
        self.reused_images = 0
        self.drafts = Drafts()
        self.refused = 0  # number of requests that the engine rejected because its waiting queue was full
        self._child = child
        self._reader = child.reader
        self._writer = child.writer
        self._on_exit = on_exit
        self._memory = memory
        self._least_pages = least_pages
        self._decoder = FrameDecoder(FromEngine)
        self._drain_lock = asyncio.Lock()
        self._ids = itertools.count(1)
        self._streams: dict[int, TokenStream] = {}
        self._expects_report = False  # whether the engine must answer a message with a report
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
        least_pages: int = 0,
    ) -> "EngineClient":
        """Start an engine process and wait until its model is loaded.

        Args:
            on_exit: called with the reason if the engine ends unexpectedly after the load.
            load_seconds: seconds without progress after which a loading engine counts as hung and is killed.
            step_seconds: seconds without progress after which a working engine counts as hung and is killed. In steps
                whose duration the engine can predict, the limit is usually shorter (see `HangDetector`).
            memory: grants the engine's memory requests; None for a new `MemoryGrants` that holds no memory in reserve.
            group: the other hosts that compute parts of the model; None if this host computes the whole model.
            least_pages: minimum number of KV pages. If fewer fit in the free memory, the load fails.

        Raises:
            DoesNotFitError: the model needs more memory than is free.
            ModelFileError: the file is corrupt or of an unsupported kind.
            HelexaError: loading failed for another reason; the message has one line.
        """
        client = cls(await spawn(), options, on_exit, memory or MemoryGrants(), least_pages)
        try:
            client._write(Load(str(model_path), options, step_seconds, group))
            client._watch_progress(load_seconds, lambda: True)
            await client._loaded(on_progress)
        except BaseException as error:
            client._stop_watching_progress()
            await asyncio.shield(client._end(grace=0.0))
            if isinstance(error, ValueError):
                raise HelexaError(
                    f"the engine sent an invalid message: {error}; restart the node if helexa was upgraded"
                ) from None
            raise
        client._stop_watching_progress()
        # A new context, because the task outlives the request that loads the model.
        client._watcher = asyncio.create_task(client._watch(), context=Context())
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
        """Granted bytes that other processes use (see `MemoryGrants.observe`)."""
        return self._memory.missing(self._child.pid)

    @property
    def granted_bytes(self) -> int:
        """Bytes of memory that the engine was granted."""
        return self._memory.granted(self._child.pid)

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
        prefix_key: str = "",
        wake_at: int = 1,
        images: "Sequence[SharedImage]" = (),
        image_ranges: Sequence[ImageRange] = (),
    ) -> TokenStream:
        """Return a stream of the tokens that the model generates after `prompt`.

        The request is sent when the stream is first awaited. `TokenStream` describes the argument `wake_at`. The
        message `Generate` describes the other arguments. If the engine does not run, the call raises `ApiError` (503).
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
            prefix_key=prefix_key,
            images=[PromptImage(image.digest, image.layout) for image in images],
            image_ranges=list(image_ranges),
        )
        return TokenStream(self.submit, self.cancel, message, wake_at, [image.pixels for image in images])

    async def embed(self, prompt: list[int], *, pooling: Pooling = "mean", salt: str = "") -> Embedding:
        """Return the embedding of `prompt`, or an `Embedding` with an error.

        The message `Embed` describes the arguments. If the calling task is canceled, the engine drops the request. If
        the engine is not running, the method raises an `ApiError` (503).
        """
        self._require_alive()
        message = Embed(id=next(self._ids), prompt=prompt, pooling=pooling, salt=salt)
        async with aclosing(TokenStream(self.submit, self.cancel, message)) as outputs:
            output = await anext(outputs)
        return Embedding(id=message.id, vector=output.vector, error=output.error, retry=output.retry)

    async def clear_prefixes(self) -> None:
        """Let the engine forget all cached prefixes, and wait until they are forgotten.

        Raises:
            ApiError: status 503: the engine is not running.
            TimeoutError: the engine has not forgotten them within a minute, for example because of a long step.
        """
        self._require_alive()
        self._write(ClearPrefixes())
        self._clears = wanted = self._clears + 1
        async with asyncio.timeout(_CLEAR_SECS):
            while self._cleared < wanted and self.alive:
                self._cleared_more.clear()
                await self._cleared_more.wait()

    async def close(self, grace: float = 5.0, save_secs: float = 2.0) -> None:
        """Send `Shutdown`; after `grace` seconds, end the process by signals.

        Unfinished token streams end with an error.

        Args:
            save_secs: longest time for saving pages of the prefix cache to disk, in seconds; less than `grace`.
        """
        self._closing = True
        self._fail_streams(_ENDED)
        if self._child.alive:
            self._write(Shutdown(save_secs))
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
            if stream.pixels and self.alive:
                await self._child.pixels.send(message.id, stream.pixels)
            if not self.alive:
                stream.put(TokenOutput(id=message.id, finish="error", error=self._death or _ENDED, retry=True))
                return
            self._streams[message.id] = stream
            self._write(message)

    def cancel(self, number: int) -> None:
        """Tell the engine to drop request `number`, unless the request has ended."""
        if self._streams.pop(number, None) is not None and self.alive:
            self._write(Cancel(number))

    def _require_alive(self) -> None:
        if not self.alive:
            raise service_unavailable(
                "the model's engine is not running, and may be restarting; retry in 2 s", retry_after=2
            )

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
                        self._write(self._memory.grant(self._child.pid, message, self._least_pages))
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
                        raise HelexaError(
                            f"the engine sent an unexpected message, {type(message).__name__}, while loading the "
                            "model; load the model again"
                        )
        await self._end(grace=2.0)
        if self._child.ended_by_bad_read:
            raise ModelFileError(
                "a model file or its packed weights (see `helexa cache`) was truncated while it was loaded, or the "
                "disk cannot be read",
                advice="load the model again, and download it again if this fails",
            )
        raise HelexaError(f"{self._child.ending()} while loading the model; see the node's log")

    async def _read(self) -> bytes:
        """Return the next bytes from the engine, empty if the engine closed the socket."""
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
            fields = (self._child.pid, quoted(error))
            log.error(
                "engine sent an invalid message and is ended pid=%d error=%s; the node starts a new engine", *fields
            )
        self._death = "the model's engine ended unexpectedly; it is being restarted"
        self._fail_streams(self._death)
        if self._closing:
            return
        await self._end(grace=2.0)
        reason = self._child.ending()
        log.error(
            "engine ended unexpectedly pid=%d error=%s; its requests fail, and the node starts a new engine",
            self._child.pid,
            quoted(reason),
        )
        if self._on_exit is not None and not self._closing:
            self._on_exit(reason)

    def _watch_progress(self, seconds: float, works: Callable[[], bool]) -> None:
        watchdog = kill_when_hung(self._child, seconds, lambda: works() and not self._closing, lambda: self.reports)
        self._watchdog = asyncio.create_task(watchdog, context=Context())

    def _stop_watching_progress(self) -> None:
        if self._watchdog is not None:
            self._watchdog.cancel()
            self._watchdog = None

    def _take(self, report: StepReport) -> None:
        self.reports += 1
        self._expects_report = False
        self.running, self.waiting, self.free_pages = report.running, report.waiting, report.free_pages
        self.prompt_tokens, self.cached_tokens = report.prompt_tokens, report.cached_tokens
        self.cached_prompts, self.disk = report.cached_prompts, report.disk
        if report.prefixes is not None:
            self.prefixes = report.prefixes
        if report.cleared != self._cleared:
            self._cleared = report.cleared
            self._cleared_more.set()
        self.encoded_images, self.reused_images = report.encoded_images, report.reused_images
        self.drafts = report.drafts
        for output in report.outputs:
            if output.finish is None:
                stream = self._streams.get(output.id)
            else:
                stream = self._streams.pop(output.id, None)
                self.refused += (output.error or "").startswith(OVERLOADED)
            if stream is not None:
                stream.put(output)

    def _fail_streams(self, error: str) -> None:
        self._cleared_more.set()
        streams, self._streams = self._streams, {}
        for number, stream in streams.items():
            stream.put(TokenOutput(id=number, finish="error", error=error, retry=True))

    async def _end(self, grace: float) -> None:
        await self._child.end(grace)
