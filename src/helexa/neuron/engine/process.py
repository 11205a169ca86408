"""The engine process: one loaded model, one scheduler, one loop. Started by `EngineClient`, ends with its socket."""

import argparse
import faulthandler
import gc
import logging
import os
import select
import signal
import socket
import sys
from contextlib import closing
from pathlib import Path

import msgspec
import psutil
import torch

from helexa.core.errors import HelexaError, ModelFileError
from helexa.neuron import lifeline
from helexa.neuron.engine.debug_fault import Faults
from helexa.neuron.engine.device import DeviceError
from helexa.neuron.engine.grammars import Failure, Grammars
from helexa.neuron.engine.messages import (
    Cancel,
    Embed,
    EngineOptions,
    FrameDecoder,
    FromEngine,
    Generate,
    Grant,
    LoadFailed,
    Needs,
    Progress,
    Ready,
    Shutdown,
    StepReport,
    ToEngine,
    TokenOutput,
    encode,
)
from helexa.neuron.engine.pages import PagePool
from helexa.neuron.engine.runner import PAGE_SIZE, Runner, load
from helexa.neuron.engine.scheduler import Scheduler
from helexa.neuron.engine.sequence import Sequence
from helexa.neuron.engine.states import StatePool
from helexa.neuron.engine.steps import Steps

_log = logging.getLogger("helexa.neuron.engine")
_PROGRESS_STEP = 8 << 20  # bytes between two progress messages


class Engine:
    """Serves requests from one socket until it closes.

    Args:
        connection: a connected stream socket.
        model: where the runner's model is; grammars need its vocabulary.
    """

    def __init__(self, connection: socket.socket, runner: Runner, options: EngineOptions, model: Path) -> None:
        self._connection = connection
        self._decoder = FrameDecoder(ToEngine)
        facts = runner.facts
        pages = PagePool(facts.kv_pages, PAGE_SIZE)
        states = StatePool(facts.max_sequences, facts.snapshots) if facts.state_bytes else None
        bounded = msgspec.structs.replace(
            options, context_length=facts.context_length, max_sequences=facts.max_sequences
        )
        self._scheduler = Scheduler(bounded, pages, states)
        self._grammars = Grammars(model, facts.vocab_size)
        overlap = runner.device.type == "cuda" if options.overlap is None else options.overlap
        self._steps = Steps(runner, self._scheduler, overlap)

    def serve(self) -> None:
        """Loop: take what has arrived, run a step, report it. Returns on `Shutdown` or when the server is gone."""
        with closing(self._grammars):
            while self._round():
                pass

    def _round(self) -> bool:
        """One round of the loop; False when it is time to end."""
        scheduler = self._scheduler
        outputs: list[TokenOutput] = []
        if not self._receive(outputs):
            return False
        try:
            outputs += self._steps.advance()
            scheduler.check_idle()
        except Exception as error:
            _log.exception("this engine process ends")
            self._report(outputs + scheduler.fail_all(f"the engine failed: {type(error).__name__}"))
            raise SystemExit(1) from error
        self._report(outputs)
        return True

    def _receive(self, outputs: list[TokenOutput]) -> bool:
        """Handle waiting messages, blocking while there is nothing to compute; False when it is time to end."""
        timeout = None if self._steps.idle else 0
        while ready := select.select([self._connection, self._grammars], [], [], timeout)[0]:
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
                    self._take(Sequence(message), outputs)
                elif isinstance(message, Embed):
                    self._take(Sequence.to_embed(message), outputs)
        return True

    def _take(self, sequence: Sequence, outputs: list[TokenOutput]) -> None:
        """Queue a sequence, or have its grammar compiled before."""
        if not sequence.request.grammar:
            self._add(sequence, None, outputs)
        elif len(self._grammars) < self._scheduler.options.max_waiting:
            self._grammars.begin(sequence)
        else:
            overloaded = Failure(f"overloaded: {len(self._grammars)} requests are waiting already")
            self._add(sequence, overloaded, outputs)

    def _add(self, sequence: Sequence, failure: Failure | None, outputs: list[TokenOutput]) -> None:
        if failure is None:
            refusal = self._scheduler.add(sequence)
        else:
            refusal = self._scheduler.refusal(sequence, failure.error, bad_grammar=failure.bad_grammar)
        if refusal is not None:
            outputs.append(refusal)

    def _report(self, outputs: list[TokenOutput]) -> None:
        scheduler = self._scheduler
        report = StepReport(
            outputs=outputs,
            running=len(scheduler.running),
            waiting=len(scheduler.waiting) + len(self._grammars),
            free_pages=scheduler.pages.free,
            prompt_tokens=scheduler.prompt_tokens,
            cached_tokens=scheduler.cached_tokens,
        )
        self._connection.sendall(encode(report))


def main() -> None:
    """Load the model, say `Ready` (or `LoadFailed`), serve."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--options", required=True)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server decides when an engine ends
    lifeline.hold()
    faulthandler.register(signal.SIGUSR1)  # the server wants to know where a process hangs
    options = msgspec.json.decode(arguments.options, type=EngineOptions)
    connection = socket.socket(fileno=arguments.fd)
    code = 0
    try:
        runner = _load(connection, arguments.model, options)
        if runner is not None:
            gc.collect()
            gc.freeze()  # a model is many objects, none of which the collector need look through in the midst of steps
            Engine(connection, runner, options, arguments.model).serve()
    except (BrokenPipeError, ConnectionResetError):
        pass  # the server is gone, and so are we
    except SystemExit as end:
        code = int(end.code or 0)
    logging.shutdown()
    os._exit(code)  # taking everything down in order takes long, and for ever on a device that is broken


def _load(connection: socket.socket, model: Path, options: EngineOptions) -> Runner | None:
    reported = 0

    def on_progress(done: int, total: int) -> None:
        nonlocal reported
        faults.loading()
        if done - reported >= _PROGRESS_STEP:
            reported = done
            report("weights", done, total)

    def report(stage: str, done: int, total: int) -> None:
        taken = torch.cuda.memory_reserved() if options.device.startswith("cuda") else 0
        _send(connection, Progress(stage=stage, done=done, total=total, taken=taken))

    def ask(needs: Needs) -> Grant:
        _send(connection, needs)
        return _granted(connection)

    torch.set_num_threads(options.threads or _physical_cores())
    try:
        faults = Faults.of(model, os.environ)
        runner = load(model, options, on_progress, ask)
        runner.warm_up(lambda done, total: report("graphs", done, total))
        faults.afflict(runner)
    except BrokenPipeError:
        raise
    except Exception as error:
        _send(connection, _load_failure(model, error))
        return None
    facts = runner.facts
    _send(
        connection,
        Ready(
            model_type=facts.model_type,
            device=str(runner.device),
            dtype=str(runner.ops.dtype).removeprefix("torch."),
            kernels=runner.ops.name,
            context_length=facts.context_length,
            vocab_size=facts.vocab_size,
            kv_pages=facts.kv_pages,
            page_size=PAGE_SIZE,
            weight_bytes=facts.weight_bytes,
            kv_bytes=facts.kv_bytes,
            state_bytes=facts.state_bytes,
            quant=facts.quant,
            memory_bytes=facts.memory_bytes,
            max_sequences=facts.max_sequences,
        ),
    )
    return runner


def _granted(connection: socket.socket) -> Grant:
    """The server's answer to what this engine needs."""
    decoder = FrameDecoder(ToEngine)
    while data := connection.recv(1 << 16):
        for message in decoder.feed(data):
            if isinstance(message, Grant):
                return message
    raise BrokenPipeError("the server is gone")


def _load_failure(model: Path, error: Exception) -> LoadFailed:
    if isinstance(error, ModelFileError):
        return LoadFailed(kind="model_file", message=str(error))
    if isinstance(error, DeviceError):
        return LoadFailed(kind="device", message=str(error))
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or "allocate memory" in str(error):
        return LoadFailed(kind="out_of_memory", message=f"{model.name} does not fit into memory")
    _log.exception("loading %s failed", model)
    if isinstance(error, HelexaError):
        return LoadFailed(kind="internal", message=str(error))
    return LoadFailed(kind="internal", message=f"loading {model.name} failed: {type(error).__name__}")


def _send(connection: socket.socket, message: FromEngine) -> None:
    connection.sendall(encode(message))


def _physical_cores() -> int:
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(min(psutil.cpu_count(logical=False) or allowed, allowed), 1)


if __name__ == "__main__":
    main()
