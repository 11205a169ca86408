"""The engine loop: receives messages, runs a step and reports the outputs of the step."""

import logging
import os
import selectors
import socket
from contextlib import closing
from pathlib import Path

import msgspec

from helexa.neuron.engine.execution.runner import Runner
from helexa.neuron.engine.ipc.frames import FrameDecoder, encode
from helexa.neuron.engine.ipc.messages import (
    Cancel,
    Embed,
    EngineOptions,
    Generate,
    Shutdown,
    StepReport,
    ToEngine,
    TokenOutput,
)
from helexa.neuron.engine.ipc.pixel_socket import PixelReceiver
from helexa.neuron.engine.plan_log.recorded_scheduler import scheduler_of
from helexa.neuron.engine.plan_log.records import Setup
from helexa.neuron.engine.scheduling.grammar_compiler import GrammarFailure, Grammars
from helexa.neuron.engine.scheduling.prompt_images import TEXT_TRAITS
from helexa.neuron.engine.scheduling.sequence import Sequence
from helexa.neuron.engine.step.step_input import Float32
from helexa.neuron.engine.steps import Steps
from helexa.neuron.ops.constants import PAGE_SIZE

_log = logging.getLogger("helexa.neuron.engine")


class Engine:
    """The engine: receives requests from a socket and runs steps for them, until the socket closes.

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
        setup = Setup(
            options=msgspec.structs.replace(
                options, context_length=facts.context_length, max_sequences=facts.max_sequences
            ),
            pages=facts.kv_pages,
            page_size=PAGE_SIZE,
            snapshots=facts.snapshots if facts.state_bytes else None,
            step_seconds=step_seconds,
            token_seconds=facts.token_seconds,
            image_traits=TEXT_TRAITS if runner.encoder is None else runner.encoder.traits,
        )
        self._pixels = None
        self._encoder = runner.encoder
        if runner.encoder is not None and pixel_socket is not None:
            self._pixels = PixelReceiver(pixel_socket, runner.encoder.patch_values)
        self._scheduler = scheduler_of(setup, os.environ)
        self._grammars = Grammars(model, facts.vocab_size)
        self._selector = selectors.DefaultSelector()
        self._selector.register(connection, selectors.EVENT_READ)
        self._selector.register(self._grammars, selectors.EVENT_READ)
        overlap = runner.device.type == "cuda" if options.overlap is None else options.overlap
        overlap = overlap and runner.computes_alone  # other processes do not have the tokens of a step in flight
        self._steps = Steps(runner, self._scheduler, overlap)

    def serve(self) -> None:
        """Receive messages, run steps and report outputs, until `Shutdown` arrives or the server closes the socket."""
        with closing(self._grammars), self._selector:
            while self._round():
                pass

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
            _log.exception("this engine process ends")
            self._report(outputs + scheduler.fail_all(f"the engine failed: {type(error).__name__}"))
            raise SystemExit(1) from error
        self._report(outputs)
        return True

    def _receive(self, outputs: list[TokenOutput]) -> bool:
        """Handle the messages that have arrived. If no sequence needs a step, wait for the next message.

        Errors of rejected requests are appended to `outputs`. Return False if the engine must end.
        """
        timeout = None if self._steps.idle else 0
        while events := self._selector.select(timeout):
            ready = [key.fileobj for key, _ in events]
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
                    return False
                if isinstance(message, Cancel):
                    self._grammars.cancel(message.id)
                    self._scheduler.cancel(message.id)
                elif isinstance(message, Generate):
                    self._take(Sequence(message, pixels=self._pixels_of(message)), outputs)
                elif isinstance(message, Embed):
                    self._take(Sequence.to_embed(message), outputs)
        return True

    def _take(self, sequence: Sequence, outputs: list[TokenOutput]) -> None:
        """Queue a new sequence. If it has a grammar, queue it only after the grammar is compiled.

        If too many grammars are waiting for compilation, the request is rejected, and its error is appended to
        `outputs`.
        """
        if not sequence.request.grammar:
            self._add(sequence, None, outputs)
        elif len(self._grammars) < self._scheduler.options.max_waiting:
            self._grammars.begin(sequence)
        else:
            overloaded = GrammarFailure(f"overloaded: {len(self._grammars)} requests are waiting already")
            self._add(sequence, overloaded, outputs)

    def _pixels_of(self, message: Generate) -> list[Float32]:
        """Receive the pixels of the images of a request."""
        if not message.images:
            return []
        assert self._pixels is not None, "the server sends no images to a model that reads text only"
        return self._pixels.receive(message.id, [image.layout.patches for image in message.images])

    def _add(self, sequence: Sequence, failure: GrammarFailure | None, outputs: list[TokenOutput]) -> None:
        if failure is None:
            rejection = self._scheduler.add(sequence)
        else:
            rejection = sequence.failure(failure.error, bad_grammar=failure.bad_grammar)
        if rejection is not None:
            outputs.append(rejection)

    def _report(self, outputs: list[TokenOutput]) -> None:
        scheduler = self._scheduler
        report = StepReport(
            outputs=outputs,
            running=len(scheduler.running),
            waiting=len(scheduler.waiting) + len(self._grammars),
            free_pages=scheduler.pages.free,
            prompt_tokens=scheduler.queues.prompt_tokens,
            cached_tokens=scheduler.queues.cached_tokens,
            encoded_images=0 if self._encoder is None else self._encoder.encoded,
            reused_images=0 if self._encoder is None else self._encoder.reused,
        )
        self._connection.sendall(encode(report))
