"""The engine loop with a runner that fails on purpose: which errors end the engine, and which it survives."""

import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from helexa.neuron.engine import loop
from helexa.neuron.engine.execution.runner import ModelFacts
from helexa.neuron.engine.ipc.engine_options import EngineOptions
from helexa.neuron.engine.ipc.message_and_pixel_sockets import FrameDecoder, encode
from helexa.neuron.engine.ipc.messages import (
    Embed,
    FromEngine,
    Generate,
    SamplingParams,
    Shutdown,
    StepReport,
    TokenOutput,
)
from helexa.neuron.engine.loop import Engine
from helexa.neuron.engine.scheduling.plan import Plan
from helexa.neuron.engine.step_input_and_graph_sizes import Float32
from helexa.neuron.engine.step_output_logprobs_and_pooling import RejectionMasks, StepOutput
from helexa.neuron.ops.batch import Bucket
from helexa.neuron.ops.kernel_header import NON_FINITE

GREEDY = SamplingParams(temperature=0)
OPTIONS = EngineOptions()
FACTS: dict[str, Any] = dict.fromkeys(ModelFacts.__dataclass_fields__, 0) | {
    "model_type": "none",
    "quant": "",
    "drafts": None,
    "kv_pages": 20,
    "context_length": 1024,
    "max_sequences": 8,
}


@pytest.fixture(autouse=True)
def _steps_are_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "build_step", lambda plan, *rest: plan)


class Runner:
    """Runs plans with `step`. The hidden state of a sequence with token 7 is infinite."""

    device = torch.device("cpu")
    computes_alone = True
    counts_kernels = False
    encoder = None
    draft = None
    draft_head = None
    buckets: ClassVar[list[Bucket]] = []
    facts = ModelFacts(**FACTS)

    def __init__(self, step: Callable[[Plan], list[int]]) -> None:
        self._step = step
        self.cleared: list[int] = []
        self.probe_is_finite = True

    def launch(self, plan: Plan, after: object, keep: bool = False) -> "Computed":
        return Computed(StepOutput(self._step(plan), {}, hidden_of(plan)))

    def clear(self, pages: list[int]) -> None:
        self.cleared += pages

    def computes_finite_logits(self, parts: list[int], slot: int | None) -> bool:
        return self.probe_is_finite


@dataclass
class Computed:
    """A finished step."""

    outcome: StepOutput

    def read(self, rejection_masks: RejectionMasks) -> StepOutput:
        return self.outcome


def hidden_of(plan: Plan) -> dict[int, Float32]:
    pooled = [entry.sequence for entry in plan if entry.sequence.pooled is not None]
    return {seq.id: np.array([np.inf if 7 in seq.tokens else 1.0], np.float32) for seq in pooled}


class RunningEngine:
    """An engine that runs in a thread, and the server's end of its socket."""

    def __init__(self, runner: Runner, ours: socket.socket, thread: threading.Thread) -> None:
        self.runner = runner
        self.thread = thread
        self._socket = ours
        self._decoder = FrameDecoder(FromEngine)

    def generate(self, *prompts: list[int]) -> dict[int, TokenOutput]:
        """Send one frame sequence with a request per prompt; return the last output of each by number."""
        return self._send(
            Generate(id=number, prompt=prompt, max_tokens=3, sampling=GREEDY) for number, prompt in enumerate(prompts)
        )

    def embed(self, *prompts: list[int]) -> dict[int, TokenOutput]:
        """Send an embedding request per prompt; return the last output of each by number."""
        return self._send(Embed(id=number, prompt=prompt) for number, prompt in enumerate(prompts))

    def _send(self, requests: Iterable[Generate | Embed]) -> dict[int, TokenOutput]:
        frames = [encode(request) for request in requests]
        self._socket.sendall(b"".join(frames))
        ended: dict[int, TokenOutput] = {}
        while len(ended) < len(frames):
            data = self._socket.recv(65536)
            assert data, "the engine closed the socket"
            for report in self._decoder.feed(data):
                assert isinstance(report, StepReport)
                ended |= {output.id: output for output in report.outputs if output.finish}
        return ended

    def end(self) -> None:
        self._socket.sendall(encode(Shutdown()))


@pytest.fixture(params=[False, True], ids=["", "overlap"], autouse=True)
def options(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run each test with and without overlapping steps."""
    monkeypatch.setattr(f"{__name__}.OPTIONS", EngineOptions(speculation=False, overlap=request.param))


@contextmanager
def served(step: Callable[[Plan], list[int]]) -> Iterator[RunningEngine]:
    ours, theirs = socket.socketpair()
    runner = Runner(step)
    engine = Engine(theirs, runner, OPTIONS, Path("no model"))  # type: ignore[arg-type]

    def serve() -> None:
        with theirs, suppress(SystemExit):
            engine.serve()

    thread = threading.Thread(target=serve)
    with ours:
        thread.start()
        running = RunningEngine(runner, ours, thread)
        try:
            yield running
        finally:
            with suppress(OSError):  # the engine has already ended
                running.end()
            thread.join(60)
            assert not thread.is_alive()


def has(plan: Plan, token: int) -> bool:
    return any(token in entry.sequence.tokens for entry in plan)


def nines(plan: Plan) -> list[int]:
    return [9 for entry in plan if entry.samples]


def ended(output: TokenOutput) -> tuple[str | None, bool]:
    return output.finish, output.retry


def raising(error: Exception, token: int = 7) -> Callable[[Plan], list[int]]:
    def step(plan: Plan) -> list[int]:
        if has(plan, token):
            raise error
        return nines(plan)

    return step


def test_device_error_ends_the_engine_and_marks_its_requests_as_retryable():
    with served(raising(torch.AcceleratorError("gone"))) as engine:
        outputs = engine.generate([1, 2], [3, 7])
        assert [ended(output) for output in outputs.values()] == [("error", True)] * 2
        engine.thread.join(60)
        assert not engine.thread.is_alive()


@pytest.mark.parametrize("error", [ValueError("x"), torch.OutOfMemoryError("x"), AssertionError("x")])
def test_error_that_is_not_a_device_error_fails_only_its_request(error: Exception):
    with served(raising(error)) as engine:
        for _ in range(3):
            outputs = engine.generate([1, 2], [3, 7], [4] * 100)
            assert [ended(outputs[number]) for number in range(3)] == [
                ("length", False),
                ("error", False),
                ("length", False),
            ]
            assert type(error).__name__ in (outputs[1].error or "")


def test_engine_continues_after_a_request_has_raised_an_exception_nine_times():
    with served(raising(ValueError("x"))) as engine:
        for _ in range(9):
            assert ended(engine.generate([7])[0]) == ("error", False)
        assert ended(engine.generate([1])[0]) == ("length", False)


def test_three_out_of_memory_steps_in_a_row_end_the_engine():
    with served(raising(MemoryError())) as engine:
        endings = [ended(engine.generate([7])[0]) for _ in range(3)]
        assert endings == [
            ("error", False),
            ("error", False),
            ("error", True),
        ]
        engine.thread.join(60)
        assert not engine.thread.is_alive()


def test_successful_prefill_steps_do_not_reset_the_out_of_memory_count():
    def step(plan: Plan) -> list[int]:
        if any(entry.samples for entry in plan):
            raise MemoryError
        return []

    with served(step) as engine:
        prompts = [[token] * 900 for token in range(3)]
        assert [ended(engine.generate(prompt)[0]) for prompt in prompts] == [
            ("error", False),
            ("error", False),
            ("error", True),
        ]


def non_finite_for(tokens: set[int]) -> Callable[[Plan], list[int]]:
    def step(plan: Plan) -> list[int]:
        return [NON_FINITE if tokens & set(entry.sequence.tokens) else 9 for entry in plan if entry.samples]

    return step


def test_non_finite_logits_fail_the_request_and_clear_its_pages():
    with served(non_finite_for({7})) as engine:
        for _ in range(5):
            outputs = engine.generate([1, 2], [3, 7])
            assert [ended(outputs[number]) for number in range(2)] == [("length", False), ("error", False)]
        assert engine.runner.cleared


def test_non_finite_logits_end_the_engine_if_a_probe_step_is_also_non_finite():
    with served(non_finite_for({7, 8})) as engine:
        outputs = engine.generate([1, 7], [3, 8])
        assert [ended(output) for output in outputs.values()] == [("error", False)] * 2
        engine.runner.probe_is_finite = False
        outputs = engine.generate([1, 7], [3, 8])
        assert [ended(output) for output in outputs.values()] == [("error", True)] * 2
        engine.thread.join(60)
        assert not engine.thread.is_alive()


def test_request_with_non_finite_logits_does_not_fail_the_chunked_prompt_of_another_request():
    with served(non_finite_for({7})) as engine:
        outputs = engine.generate([7], [1] * 900)
        assert [ended(outputs[number]) for number in range(2)] == [("error", False), ("length", False)]


def test_non_finite_embedding_fails_its_request_and_may_end_the_engine():
    with served(nines) as engine:
        for _ in range(3):
            outputs = engine.embed([1, 7], [3])
            assert [ended(outputs[number]) for number in range(2)] == [("error", False), ("stop", False)]
            assert outputs[1].vector == [1.0]
            assert ended(engine.embed([2])[0]) == ("stop", False)
        long = [7] * 900
        assert ended(engine.embed(long)[0]) == ("error", False), "a prompt of several steps counts once"
        assert ended(engine.generate([1])[0]) == ("length", False)
        assert [ended(output) for output in engine.embed([1, 7], [3, 7]).values()] == [("error", False)] * 2
        engine.runner.probe_is_finite = False
        assert ended(engine.embed([7])[0]) == ("error", True)
        engine.thread.join(60)
        assert not engine.thread.is_alive()
