"""Random schedules on a simulated cache: each step reads the KV slots and the states of the sequence's own tokens.

The schedules have images, common prefixes, cancels, failing steps, preemption by few pages, few snapshots, drafts and
overlapping steps. The output of each sequence equals its output alone.
"""

import random
from collections import Counter
from typing import Any

import pytest
from simulated_images import image, image_request
from simulated_runner import FATAL, FATAL_LATE, NOT_FINITE, STOP, SimulatedRunner, next_token

from helexa.neuron.engine import loop
from helexa.neuron.engine.execution import device_errors
from helexa.neuron.engine.ipc.engine_options import EngineOptions
from helexa.neuron.engine.ipc.messages import Generate, PromptImage, SamplingParams
from helexa.neuron.engine.kv_cache_and_prefix_hashes import PagePool, StatePool
from helexa.neuron.engine.loop import Steps
from helexa.neuron.engine.scheduling.prompt_images import ImageTraits
from helexa.neuron.engine.scheduling.scheduler import Scheduler
from helexa.neuron.engine.scheduling.sequence import Sequence
from helexa.neuron.engine.window_page_pool import WindowPages, window_pages_needed
from helexa.neuron.ops.kernel_header import MAX_DRAFTS
from nightly import cases

PAGE = 4
SCHEDULES = cases(300, 10_000, "HELEXA_TEST_SCHEDULES")
CHUNKS = 10
IMAGES = [image(number, tokens) for number, tokens in enumerate((3, 5, 6, 9))]


@pytest.fixture(autouse=True)
def _steps_are_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "build_step", lambda plan, *rest: plan)
    monkeypatch.setattr(device_errors, "_MOST_STRIKES", 100_000)


def random_requests(chance: random.Random, crowded: bool) -> list[Generate]:
    """Return requests with common beginnings and common images. Some of them make steps fail.

    Args:
        crowded: whether most requests have an image after a common beginning that ends with a page, so that sequences
            start from a snapshot and wait for the image tokens of a step.
    """
    lengths = (PAGE, 2 * PAGE, 3 * PAGE)
    stems = [[30 + number] * chance.choice(lengths if crowded else range(1, 15)) for number in range(2)]
    bad = chance.random() < 0.3
    requests: list[Generate] = []
    for number in range(chance.randint(3, 24)):
        stem = stems[0] if crowded else chance.choice(stems)
        parts: list[PromptImage | list[int]] = [stem]
        if crowded:
            parts.append(chance.choice(IMAGES) if number % 3 else [40])
        for _ in range(0 if crowded else chance.choice((0, 1, 1, 2))):
            parts.append(chance.choice(IMAGES))
            if chance.random() < 0.3:
                parts.append([33] * chance.randint(1, 9))
        if len(parts) == 1 or chance.random() < (0.1 if crowded else 0.6):
            parts.append([40 + number % 5] * chance.randint(1, 12))
        if bad and chance.random() < 0.2:
            parts.insert(chance.randint(0, len(parts)), [chance.choice((FATAL, FATAL_LATE, NOT_FINITE))])
        settings: dict[str, Any] = {
            "max_tokens": chance.randint(0, 3 if crowded else 24),
            "salt": chance.choice(("", "", "", "a")),
        }
        if chance.random() < 0.2:
            settings["sampling"] = SamplingParams(temperature=0, repetition_penalty=1.5)
        request = image_request(number, parts, stop_ids=[STOP], **settings)
        turn = chance.choice((len(stem), chance.randint(0, len(request.prompt))))
        requests.append(image_request(number, parts, stop_ids=[STOP], turn=turn, **settings))
    return requests


def output_alone(request: Generate, most_tokens: int) -> list[int]:
    """Return the output of the simulated model for a request without other requests."""
    tokens = list(request.prompt)
    while len(tokens) - len(request.prompt) < request.max_tokens and len(tokens) < most_tokens:
        tokens.append(next_token(tokens))
        if tokens[-1] == STOP:
            break
    return tokens[len(request.prompt) :]


def check_holders(scheduler: Scheduler) -> None:
    """Check that the pools count exactly the pages and slots that running sequences have."""
    needed = Counter(page for sequence in scheduler.running for page in sequence.pages[sequence.unseen :])
    pages, windows = needed, scheduler.pages.windows
    if windows is not None:
        assert windows._holders == [needed[page] for page in range(scheduler.pages.total)]
        pages = Counter(page for sequence in scheduler.running for page in sequence.pages)
    assert scheduler.pages._holders == [pages[page] for page in range(scheduler.pages.total)]
    if scheduler.states is not None:
        restores = [sequence.restore for sequence in scheduler.running if sequence.restore is not None]
        assert scheduler.states._pins == Counter(restores)
        assert not set(restores) & set(scheduler.states._empty), "the slot of a pinned snapshot is free"
    for sequence in scheduler.waiting:
        assert (sequence.pages, sequence.slot, sequence.restore, sequence.encoded) == ([], None, None, None)


def run_schedule(seed: int) -> Counter[str]:
    """Run a random schedule; return how often its features occurred."""
    chance = random.Random(seed)
    crowded = chance.random() < 0.5  # images wait for each other, and for one snapshot slot
    requests = random_requests(chance, crowded)
    most_sequences = 8 if crowded else chance.choice((1, 2, 4, 8))
    options = EngineOptions(
        max_step_tokens=8 if crowded else chance.choice((6, 8, 12, 24)),
        max_sequences=most_sequences,
        max_waiting=100,
        speculation=chance.random() < 0.5,
        prefix_reuse="all" if crowded else chance.choice(("principal", "all", "off")),
        step_timing="fixed",
    )
    longest = max(len(request.prompt) for request in requests)
    page_count = -(-longest // PAGE) + (60 if crowded else chance.choice((1, 3, 8, 60)))
    snapshots = chance.choice((1, 1, 2)) if crowded else chance.choice((0, 1, 2, 5))
    states = StatePool(most_sequences, snapshots) if crowded or chance.random() < 0.7 else None
    window = chance.choice((None, 3, 10, 40)) if states is None else None
    windows = None
    if window is not None and chance.random() < 0.5:  # only some layers have a window
        step_tokens = options.max_step_tokens + 9  # an image may exceed the token budget
        needed = window_pages_needed(window, PAGE, most_sequences, step_tokens, MAX_DRAFTS)
        windows = WindowPages(needed, page_count, PAGE, window)
    pages = PagePool(page_count, PAGE, windows)
    scheduler = Scheduler(options, pages, states, None, ImageTraits(whole=chance.random() < 0.3), window)
    runner = SimulatedRunner(scheduler)
    engine = Steps(runner, scheduler, overlap=chance.random() < 0.5)  # type: ignore[arg-type]
    outputs: dict[int, list[int]] = {request.id: [] for request in requests}
    ends: dict[int, str] = {}
    canceled: set[int] = set()
    seen: Counter[str] = Counter()
    waiting, pace, pause = list(requests), chance.choice((0.1, 0.3, 0.8)), False
    for _ in range(5000):
        pause = pause and not engine.idle
        while waiting and not pause and chance.random() < pace:
            assert scheduler.add(Sequence(waiting.pop(0))) is None
            pause = chance.random() < 0.3
        if scheduler.running and chance.random() < 0.03:
            sequence = chance.choice([*scheduler.running, *scheduler.waiting])
            canceled.add(sequence.id)
            assert scheduler.cancel(sequence.id)
        for output in engine.advance():
            assert output.id not in ends, "output after the last output"
            outputs[output.id] += output.tokens
            if output.finish is not None:
                ends[output.id] = output.finish
        check_holders(scheduler)
        seen["released"] += sum(sequence.unseen for sequence in scheduler.running)
        seen["waiting snapshots"] += sum(sequence.restore is not None for sequence in scheduler.running)
        if not waiting and engine.idle:
            break
    else:
        raise AssertionError("the requests do not end")
    scheduler.check_idle()
    for request in requests:
        expected, output = output_alone(request, pages.total * PAGE), outputs[request.id]
        if {FATAL, FATAL_LATE, NOT_FINITE} & set(request.prompt):
            assert ends.get(request.id) == "error" or request.id in canceled or not request.max_tokens
            expected = expected[: len(output)]
        elif ends.get(request.id) is None:
            assert request.id in canceled
            expected = expected[: len(output)]
        assert output == expected, f"request {request.id} ended with {ends.get(request.id)}"
    seen["cached"] += scheduler.queues.cached_tokens
    seen["overlapping"] += runner.ahead
    seen["canceled"] += len(canceled)
    seen["failed"] += sum(end == "error" for end in ends.values())
    return seen


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_states_pages_and_outputs_are_correct_in_random_schedules(chunk: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(chunk, SCHEDULES, CHUNKS):
        try:
            seen += run_schedule(seed)
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise
    features = ("waiting snapshots", "released", "cached", "overlapping", "canceled", "failed")
    assert all(seen[name] for name in features), seen
