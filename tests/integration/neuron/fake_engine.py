"""An engine process that speaks the IPC protocol without a model.

The name of the model folder selects the behavior, as one or more of these words, joined by dots:

    slow          reports progress and waits for the file `<model>.go` before it is ready
    bad-file, no-memory    fail to load
    hungry        requests 60 of 100 MiB of memory that all models of the node may use
    crash         exits before it is ready
    deaf          ignores Shutdown and SIGTERM
    saves         saves a prompt before it ends, once the file `<model>.go` exists

If a file `<model>.bad` exists, loads fail as with `bad-file`; with `<model>.crash`, as with `crash`.

The prompt selects the output:

    [1, n]      the tokens 0..n-1, one per step; requested log-probabilities are missing for the last token
    [2]         one token, then the process exits
    [3]         one token, then nothing; the request never ends
    [4]         an `overloaded` error
    [5]         the ids of canceled requests, as soon as a request is canceled
    [6, n]      like `[1, n]`, with twelve cached tokens
    [7]         nothing; the process hangs
    [8, m, n]   100 m + n tokens, then a report of 4,242 prompt tokens; the request never ends
"""

import argparse
import os
import signal
import socket
import sys
import time
from pathlib import Path

from helexa.neuron.cache_folder import PROMPTS_FOLDER, cache_root
from helexa.neuron.engine.ipc.message_and_pixel_sockets import FrameDecoder, encode, receive
from helexa.neuron.engine.ipc.messages import (
    CachedPrefixes,
    Cancel,
    ClearPrefixes,
    DiskUse,
    Generate,
    Load,
    LoadFailed,
    MemoryGrant,
    MemoryRequest,
    Progress,
    Ready,
    Shutdown,
    StepReport,
    Timing,
    ToEngine,
    TokenOutput,
)
from helexa.neuron.processes import parent_watch

HUNGER = MemoryRequest(
    device="cpu",
    free=1 << 40,
    limit=100 << 20,
    held=0,
    weights=60 << 20,
    loading=0,
    step=0,
    page_step=0,
    position_step=0,
    page=1,
    page_size=16,
    pages=100,
    kv_bits=16,
    share=1.0,
    context=1024,
    state=0,
    sequences=1,
    snapshots=0,
)
TIMING = Timing(queue_ms=1.0, prefill_ms=10.0, decode_ms=20.0)


class FakeEngine:
    """The engine's side of one connection."""

    def __init__(self, connection: socket.socket, behavior: set[str]) -> None:
        self.connection = connection
        self.behavior = behavior
        self.cancelled: list[int] = []
        self.cleared = 0
        self.prefix_keys: list[str] = []
        self.waiting_for_cancel: list[int] = []

    def serve(self) -> None:
        decoder = FrameDecoder(ToEngine)
        while data := self.connection.recv(65536):
            for message in decoder.feed(data):
                match message:
                    case Generate():
                        self.generate(message)
                    case Cancel():
                        self.cancelled.append(message.id)
                        self.report()
                    case ClearPrefixes():
                        self.cleared += 1
                        self.report()
                    case Shutdown() if "deaf" not in self.behavior:
                        return
            for number in self.waiting_for_cancel if self.cancelled else ():
                self.report(TokenOutput(id=number, tokens=self.cancelled, finish="stop", timing=TIMING))

    def generate(self, request: Generate) -> None:
        self.prefix_keys += [request.prefix_key] if request.prefix_key else []
        match request.prompt:
            case [1, count]:
                for token in range(count - 1):
                    logprobs = [(-float(token), [(token, -float(token))])] if request.sampling.logprobs else []
                    self.report(TokenOutput(id=request.id, tokens=[token], logprobs=logprobs))
                self.report(TokenOutput(id=request.id, tokens=[count - 1], finish="length", timing=TIMING))
            case [2]:
                self.report(TokenOutput(id=request.id, tokens=[7]))
                print("the device caught fire", file=sys.stderr, flush=True)
                os._exit(3)
            case [3]:
                self.report(TokenOutput(id=request.id, tokens=[7]))
            case [4]:
                self.report(TokenOutput(id=request.id, finish="error", error="overloaded: 256 requests wait"))
            case [5]:
                self.waiting_for_cancel.append(request.id)
            case [7]:
                while True:
                    signal.pause()
            case [8, hundreds, remainder]:
                for token in range(100 * hundreds + remainder):
                    self.report(TokenOutput(id=request.id, tokens=[token % 100]))
                self.report(prompt_tokens=4242)
            case [6, count]:
                self.report(TokenOutput(id=request.id, tokens=[0], cached_tokens=12))
                for token in range(1, count - 1):
                    self.report(TokenOutput(id=request.id, tokens=[token]))
                self.report(TokenOutput(id=request.id, tokens=[count - 1], finish="length", timing=TIMING))

    def report(self, *outputs: TokenOutput, prompt_tokens: int = 1000) -> None:
        self.send(
            StepReport(
                outputs=list(outputs),
                running=1,
                waiting=0,
                free_pages=90,
                prompt_tokens=prompt_tokens,
                cached_tokens=900,
                cached_prompts=9,
                disk=DiskUse(tokens=100, prompts=2, read_bytes=5000, read_ms=250, size=3 << 20),
                prefixes=CachedPrefixes(disk=[*self.prefix_keys]),
                cleared=self.cleared,
            )
        )

    def send(self, message: object) -> None:
        self.connection.sendall(encode(message))  # type: ignore[arg-type]


def wait_for_release(model: Path) -> None:
    while not model.with_suffix(".go").exists():
        time.sleep(0.01)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int)
    parser.add_argument("--pixels-fd", type=int)
    parser.add_argument("--heartbeat-fd", type=int)
    arguments = parser.parse_args()
    parent_watch.start()
    connection = socket.socket(fileno=arguments.fd)
    load = receive(connection, Load)
    model = Path(load.model)
    behavior = set(model.name.split("."))
    engine = FakeEngine(connection, behavior)
    with model.with_suffix(".starts").open("a") as file:
        file.write("x")
    if "deaf" in behavior:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if "slow" in behavior:
        engine.send(Progress(stage="weights", done=1, total=2))
        wait_for_release(model)
    if "hungry" in behavior:
        engine.send(HUNGER)
        receive(connection, MemoryGrant)
    if "bad-file" in behavior or model.with_suffix(".bad").exists():
        engine.send(LoadFailed(kind="model_file", message="the file is truncated"))
        return
    if "no-memory" in behavior:
        engine.send(LoadFailed(kind="out_of_memory", message="not enough memory"))
        return
    if "crash" in behavior or model.with_suffix(".crash").exists():
        print("WARNING fake.engine: this will not end well\ncannot begin", file=sys.stderr, flush=True)
        sys.exit(9)
    engine.send(
        Ready(
            model_type="fake",
            device="cpu",
            dtype="float32",
            kernels="none",
            context_length=1024,
            vocab_size=100,
            kv_pages=100,
            page_size=16,
            weight_bytes=1,
            kv_bytes=1,
            quant=load.options.quant,
        )
    )
    engine.serve()
    if "saves" in behavior:
        wait_for_release(model)
        folder = cache_root(None) / PROMPTS_FOLDER / "fake"
        folder.mkdir(parents=True)
        (folder / "model").write_text(load.options.model_id)
        (folder / "1-1.segment").write_bytes(bytes(100))
    if "deaf" in behavior:
        while True:
            signal.pause()


if __name__ == "__main__":
    main()
