"""Engine loop: receives messages, runs steps, and reports their outputs."""

import logging
import selectors
import socket
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec

from helexa.neuron import tensors
from helexa.neuron.engine.execution.device_errors import (
    OutOfMemoryCounter,
    is_device_fault,
    is_out_of_memory,
    release_frames,
)
from helexa.neuron.engine.execution.draft_head import HeadModel
from helexa.neuron.engine.execution.draft_model import DraftModel
from helexa.neuron.engine.execution.runner import ModelFacts, Runner
from helexa.neuron.engine.execution.step_builder_and_penalties import build_step
from helexa.neuron.engine.ipc.engine_options import EngineOptions
from helexa.neuron.engine.ipc.message_and_pixel_sockets import FrameDecoder, PixelReceiver, encode
from helexa.neuron.engine.ipc.messages import (
    CachedPrefixes,
    Cancel,
    ClearPrefixes,
    DiskUse,
    Embed,
    Generate,
    Shutdown,
    StepReport,
    ToEngine,
    TokenOutput,
)
from helexa.neuron.engine.kv_cache_and_prefix_hashes import PagePool, StatePool
from helexa.neuron.engine.prefix_save_and_restore import open_store
from helexa.neuron.engine.scheduling.grammar_compiler import GrammarFailure, Grammars
from helexa.neuron.engine.scheduling.plan import Plan, as_after, rejection_masks
from helexa.neuron.engine.scheduling.prompt_images import TEXT_TRAITS
from helexa.neuron.engine.scheduling.scheduler import Scheduler
from helexa.neuron.engine.scheduling.sequence import Sequence
from helexa.neuron.engine.scheduling.step_limits_and_fair_share import StepController
from helexa.neuron.engine.step_input_and_graph_sizes import Float32
from helexa.neuron.engine.step_output_logprobs_and_pooling import StepInFlight, StepOutput
from helexa.neuron.engine.window_page_pool import WindowPages
from helexa.neuron.ops.kernel_header import NON_FINITE, PAGE_SIZE
from helexa.neuron.processes import heartbeat

_log = logging.getLogger("helexa.neuron.engine")
_PREFIXES_SECS = 1.0  # interval at which the cached prefixes are reported while sequences run
_START_SECS = 1.0  # idle time after the start, before prompts on disk are reported to gateways


@dataclass(frozen=True)
class _Step:
    """A planned step whose launch was attempted."""

    plan: Plan
    begun: float  # time at which the launch started, in seconds of `time.perf_counter`
    tail: int = 0  # see `DraftModel.tail`
    launched: StepInFlight | None = None  # the step in flight; None if the launch failed
    error: Exception | None = None  # the exception of a failed launch, else None

    def read(self) -> StepOutput:
        """Wait for the results of the step; raise the exception of a failed launch."""
        if self.launched is None:
            raise self.error or AssertionError("never launched")
        return self.launched.read(partial(rejection_masks, self.plan))


class Steps:
    """Runs the steps that `scheduler` plans on `runner`."""

    def __init__(self, runner: Runner, scheduler: Scheduler, overlap: bool = False) -> None:
        self._runner = runner
        self._scheduler = scheduler
        # Whether to launch the next step before the results of the current step are read, if possible. If a sequence
        # turns out to end in the current step, the next step still computes one row for it. The result of this row is
        # dropped.
        self._overlap = overlap
        self._draft = None
        if runner.draft is not None and (limits := runner.facts.drafts) is not None:
            self._draft = DraftModel(runner.draft, limits, runner.facts.vocab_size)
        elif runner.draft_head is not None and (limits := runner.facts.drafts) is not None:
            self._draft = HeadModel(runner.draft_head, limits, runner.facts.vocab_size)
        self._ahead: _Step | None = None  # the step that was launched before the previous step was read
        self._strikes = OutOfMemoryCounter()
        self._read = 0.0  # `time.perf_counter` when the results of the last step were read
        # Called with the number of prompt tokens and the duration of each step without decoding sequences.
        self.on_prefill: Callable[[int, float], None] = lambda tokens, seconds: None

    @property
    def idle(self) -> bool:
        """Whether no step is in flight and the scheduler has no sequences."""
        return self._ahead is None and self._scheduler.idle

    def advance(self) -> list[TokenOutput]:
        """Run one step, if there is work, and return its outputs.

        If a step fails because of one request, only this request ends with an error. With overlap, the next step may be
        in flight after the return.

        Raises:
            Exception: the device or this process is no longer usable.
        """
        # A step that was launched ahead is read before another is planned.
        step, self._ahead = self._ahead or self._launch(self._scheduler.plan()), None
        if step is None:
            return []
        if self._overlap and step.launched is not None and self._scheduler.planner.may_plan_ahead(step.plan):
            with as_after(step.plan):
                self._ahead = self._launch(self._scheduler.plan_after(), step.launched)
        return self._finish(step)

    def _launch(self, plan: Plan, after: StepInFlight | None = None) -> _Step | None:
        if not plan:
            return None
        start_time = time.perf_counter()
        try:
            if self._draft is not None:
                self._draft.add_drafts(plan, self._scheduler.planner.gate)
            tail = 0 if self._draft is None else self._draft.tail(plan, self._scheduler.planner.gate)
            step = build_step(plan, self._runner.buckets, self._runner.encoder, self._scheduler.pages.windows, tail)
            start_time = time.perf_counter()  # the step controller must not learn the time of encoding images
            expected = self._scheduler.planner.expected_seconds(plan) if self._runner.counts_kernels else 0.0
            with heartbeat.step_of(expected):
                return _Step(plan, start_time, tail, self._runner.launch(step, after, keep=tail > 0))
        # `_finish` raises the error later, because with overlap the results of the previous step must be read first.
        except Exception as error:
            return _Step(plan, start_time, error=error)

    def _finish(self, step: _Step) -> list[TokenOutput]:
        plan = step.plan
        try:
            outcome = step.read()
        except Exception as error:
            out_of_memory = is_out_of_memory(error)
            if is_device_fault(error) or (out_of_memory and self._strikes.strike()):
                raise
            _log.error(
                "engine step failed sequences=%d; each sequence is computed again alone, or its request gets an error",
                len(plan),
                exc_info=error,
            )
            release_frames(error)  # releases the step's tensors
            if out_of_memory and self._runner.device.type == "cuda":
                # The unused blocks of the allocator may be too fragmented for the next step.
                tensors.cuda.empty_cache()
            next_step, self._ahead = self._ahead, None
            message = f"an engine step failed: {type(error).__name__}; see the node's log"
            return self._scheduler.isolate(plan, message, None if next_step is None else next_step.plan)
        # The device starts a step that was launched ahead only when the previous step ends.
        start_time, self._read = max(step.begun, self._read), time.perf_counter()
        seconds = self._read - start_time
        if not any(entry.decoding for entry in plan):
            self.on_prefill(sum(entry.count for entry in plan), seconds)
        for entry in plan:
            if entry.sequence.request.traced:
                entry.sequence.trace_step(start_time, seconds, entry.count, len(plan))
        finite = _finite_tokens(plan, outcome) + _finite_vectors(plan, outcome)
        if any(finite):  # `finite` is empty if the step has only chunks of prompts
            self._strikes.reset()
        elif finite:
            # No row is finite. A step with one token shows whether the device or the requests are the cause.
            probe_sequence = next(entry.sequence for entry in plan if entry.completes and entry.sequence.pages)
            parts = self._scheduler.pages.parts(probe_sequence.pages[-1])
            if not self._runner.computes_finite_logits(parts, probe_sequence.slot):
                raise ArithmeticError(
                    "the device computes only NaN or infinity, even for a single token, so the engine ends; if this "
                    "repeats, load the model with another dtype, or check the device"
                )
        if self._draft is not None:
            self._draft.keep(plan, outcome.kept, step.tail, self._scheduler.planner.gate)
        outputs = self._scheduler.commit(
            plan, outcome.tokens, seconds, outcome.logprobs, outcome.hidden, outcome.scores
        )
        if pages := self._scheduler.committer.take_pages_to_clear():
            self._runner.clear(pages)
            _log.error(
                "model computed NaN or infinity rows=%d step_rows=%d; the requests of these rows fail, and another "
                "dtype may help",
                finite.count(False),
                len(finite),
            )
        return outputs


def _finite_tokens(plan: Plan, outcome: StepOutput) -> list[bool]:
    """Return, for each sampled token of a running sequence, whether it was finite."""
    rows = [entry.sequence for entry in plan if entry.samples for _ in range(len(entry.drafts) + 1)]
    # A sequence that ended before the step was read has no pages.
    return [token != NON_FINITE for sequence, token in zip(rows, outcome.tokens, strict=True) if sequence.pages]


def _finite_vectors(plan: Plan, outcome: StepOutput) -> list[bool]:
    """Return, for each embedding that the step completes, whether it is finite."""
    return [
        pooled.stays_finite(entry.sequence.computed, outcome.hidden.get(entry.sequence.id))
        for entry in plan
        if entry.completes and entry.sequence.pages and (pooled := entry.sequence.pooled) is not None
    ]


def page_pool(facts: ModelFacts) -> PagePool:
    """Return a model's pool of KV pages, with window pages if the model has them."""
    windows = None
    if facts.window is not None and facts.window_pages:
        windows = WindowPages(facts.window_pages, facts.kv_pages, PAGE_SIZE, facts.window)
    return PagePool(facts.kv_pages, PAGE_SIZE, windows)


class Engine:
    """Runs steps for the requests from a socket until the socket closes.

    Args:
        connection: the socket that is connected to the server.
        model: path of the model's file or folder, from which the vocabulary is read for grammars.
        step_seconds: seconds without progress after which the server kills this engine.
        pixel_socket: the socket from which the pixels of images are received; None if the model reads text only.
    """

    def __init__(
        self,
        connection: socket.socket,
        runner: Runner,
        options: EngineOptions,
        model: Path,
        step_seconds: float = float("inf"),
        pixel_socket: socket.socket | None = None,
    ) -> None:
        self._connection = connection
        self._decoder = FrameDecoder(ToEngine)
        facts = runner.facts
        options = msgspec.structs.replace(
            options, context_length=facts.context_length, max_sequences=facts.max_sequences
        )
        self._scheduler = Scheduler(
            options,
            page_pool(facts),
            StatePool(options.max_sequences, facts.snapshots) if facts.state_bytes else None,
            StepController(options, step_seconds, facts.token_seconds),
            TEXT_TRAITS if runner.encoder is None else runner.encoder.traits,
            facts.window,
            facts.drafts,
        )
        self._pixels = None
        self._encoder = runner.encoder
        if runner.encoder is not None and pixel_socket is not None:
            self._pixels = PixelReceiver(pixel_socket, runner.encoder.patch_values)
        self._cleared, self._reported = 0, DiskUse()
        self._prefixes, self._prefixes_at = CachedPrefixes(), 0.0
        self._grammars = Grammars(model, facts.vocab_size)
        self._selector = selectors.DefaultSelector()
        self._selector.register(connection, selectors.EVENT_READ)
        self._selector.register(self._grammars, selectors.EVENT_READ)
        self._store = open_store(
            model, options, runner, self._scheduler.queues.memory, self._scheduler.pages, self._scheduler.states
        )
        if self._store is not None:
            self._selector.register(self._store, selectors.EVENT_READ)
        overlap = runner.device.type == "cuda" if options.overlap is None else options.overlap
        overlap = overlap and runner.computes_alone  # other processes do not get the sampled tokens of a step in flight
        self._steps = Steps(runner, self._scheduler, overlap)
        self._save_secs = Shutdown().save_secs
        if self._store is not None:
            self._steps.on_prefill = self._store.learn

    def serve(self) -> None:
        """Serve until `Shutdown` arrives or the socket closes, then save prompts to disk.

        Raises:
            SystemExit: the device or this process is no longer usable (see `Steps.advance`).
        """
        with closing(self._grammars), self._selector:
            while self._round():
                pass
        if self._store is not None:
            self._store.close(self._save_secs)

    def _round(self) -> bool:
        """Run one iteration of the engine loop. Return False if the engine must end."""
        scheduler = self._scheduler
        outputs: list[TokenOutput] = []
        if not self._receive(outputs):
            return False
        try:
            outputs += self._steps.advance()
            if self._steps.idle:
                scheduler.check_idle()
        except Exception as error:
            running, waiting = len(scheduler.running), len(scheduler.waiting)
            _log.exception(
                "engine process ends, because an engine step failed running=%d waiting=%d; these requests fail, and "
                "the node starts a new engine",
                running,
                waiting,
            )
            self._report(outputs + scheduler.fail_all(f"the engine failed: {type(error).__name__}; see the node's log"))
            raise SystemExit(1) from error
        self._report(outputs)
        return True

    def _receive(self, outputs: list[TokenOutput]) -> bool:
        """Handle the messages that have arrived; return False if the engine must end.

        If no sequence needs a step, wait for the next message. Errors of rejected requests are appended to `outputs`.
        """
        timeout = self._move_pages()
        while events := self._selector.select(timeout):
            ready = [key.fileobj for key, _ in events]
            if ready == [self._store]:
                break  # the next call moves the pages (`_move_pages`)
            # After the first message, handle the messages that have arrived, but do not wait for more.
            timeout = 0
            for sequence, failure in self._grammars.fetch() if self._grammars in ready else ():
                self._add(sequence, failure, outputs)
            if self._connection not in ready:
                continue
            data = self._connection.recv(1 << 20)
            if not data:
                return False
            for message in self._decoder.feed(data):
                if isinstance(message, Shutdown):
                    self._save_secs = message.save_secs
                    return False
                if isinstance(message, Cancel):
                    self._grammars.cancel(message.id)
                    self._scheduler.cancel(message.id)
                    if self._store is not None:
                        self._store.cancel(message.id)
                elif isinstance(message, ClearPrefixes):
                    self._clear_prefixes()
                elif isinstance(message, Generate):
                    self._take(Sequence(message, pixels=self._pixels_of(message)), outputs)
                elif isinstance(message, Embed):
                    self._take(Sequence.to_embed(message), outputs)
        return True

    def _clear_prefixes(self) -> None:
        """Empty the prefix cache, in memory and on disk.

        Running sequences continue. Pages that they compute later enter the cache.
        """
        self._scheduler.clear_prefixes()
        if self._store is not None:
            self._store.clear()
        self._cleared += 1

    def _take(self, sequence: Sequence, outputs: list[TokenOutput]) -> None:
        """Queue a new sequence, after its grammar is compiled if it has one."""
        if not sequence.request.grammar:
            self._add(sequence, None, outputs)
        elif len(self._grammars) < self._scheduler.options.max_waiting:
            self._grammars.begin(sequence)
        # At most `max_waiting` sequences may wait for the compilation of their grammars.
        else:
            overloaded = GrammarFailure(
                f"overloaded: {len(self._grammars)} requests already wait for their grammars; try again later"
            )
            self._add(sequence, overloaded, outputs)

    def _pixels_of(self, message: Generate) -> list[Float32]:
        if not message.images:
            return []
        assert self._pixels is not None, "the server sends no images to a model that reads text only"
        return self._pixels.receive(message.id, [image.layout.patches for image in message.images])

    def _add(self, sequence: Sequence, failure: GrammarFailure | None, outputs: list[TokenOutput]) -> None:
        if failure is None:
            rejection = self._scheduler.check(sequence)
        else:
            rejection = sequence.failure(failure.error, bad_grammar=failure.bad_grammar)
        if rejection is not None:
            outputs.append(rejection)
        elif self._store is None or not self._store.begin(sequence):
            self._scheduler.enqueue(sequence)

    def _move_pages(self) -> float | None:
        """Move KV pages from and to the disk; return the seconds to wait for messages.

        None means no time limit.
        """
        while self._store is not None:
            for sequence in self._store.move(idle=self._steps.idle):
                self._scheduler.enqueue(sequence)
            if not self._steps.idle:
                return 0
            if not self._store.has_work and self._store.use.size != self._reported.size:
                return 0  # so that the next report has the size of the saved prompts
            # Without work for a step, pages move until a message arrives or a sequence can start.
            wait = None if self._store.started and not len(self._store) else _START_SECS
            events = self._selector.select(0 if self._store.has_work else wait)
            if not events:
                self._store.start()
            if any(key.fileobj is not self._store for key, _ in events):
                return 0
        return None if self._steps.idle else 0

    def _changed_prefixes(self) -> CachedPrefixes | None:
        """Return the cached prefixes; None if they are unchanged since the last call."""
        store = self._store
        if store is None:
            latest = self._scheduler.queues.recent.prefixes({}, lambda page_hash: False)
        else:
            latest = self._scheduler.queues.recent.prefixes(store.saved_prefixes, store.on_disk)
        self._prefixes_at = time.monotonic() + _PREFIXES_SECS
        if latest == self._prefixes:
            return None
        self._prefixes = latest
        return latest

    def _report(self, outputs: list[TokenOutput]) -> None:
        scheduler = self._scheduler
        prefixes = None
        if self._steps.idle or time.monotonic() >= self._prefixes_at:
            prefixes = self._changed_prefixes()
        self._reported = DiskUse() if self._store is None else self._store.use
        report = StepReport(
            outputs=outputs,
            running=len(scheduler.running),
            waiting=len(scheduler.waiting) + len(self._grammars) + (0 if self._store is None else len(self._store)),
            free_pages=scheduler.pages.free,
            prompt_tokens=scheduler.queues.prompt_tokens,
            cached_tokens=scheduler.queues.cached_tokens,
            cached_prompts=scheduler.queues.cached_prompts,
            disk=self._reported,
            prefixes=prefixes,
            cleared=self._cleared,
            encoded_images=0 if self._encoder is None else self._encoder.encoded,
            reused_images=0 if self._encoder is None else self._encoder.reused,
            drafts=scheduler.drafts(),
        )
        self._connection.sendall(encode(report))
