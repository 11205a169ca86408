"""The store of prompts beside a slow, silent or changing disk, in the engine loop's place."""

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest

from helexa.neuron.engine import prefix_save_and_restore
from helexa.neuron.engine.execution.runner import Runner
from helexa.neuron.engine.ipc.engine_options import EngineOptions
from helexa.neuron.engine.ipc.messages import Generate, SamplingParams
from helexa.neuron.engine.kv_cache_and_prefix_hashes import PagePool, StatePool
from helexa.neuron.engine.prefix_disk import PAGE, PrefixDisk
from helexa.neuron.engine.prefix_save_and_restore import PrefixStore
from helexa.neuron.engine.scheduling.scheduler import Scheduler
from helexa.neuron.engine.scheduling.sequence import Sequence
from helexa.neuron.processes import heartbeat

PAGE_SIZE = 16
PROMPT = list(range(100, 100 + 6 * PAGE_SIZE + 1))
LIMIT_SECS = 60.0


class Caches:
    """The KV cache of a model, in bytes: the part of `Runner` that the store uses."""

    def __init__(self, page_bytes: int, state_bytes: int = 0) -> None:
        self.page_parts, self.window_parts = [page_bytes], [0]
        self.state_parts = [state_bytes] if state_bytes else [0]
        self.contents: dict[tuple[str, int], bytes] = {}

    def read_cache(self, kind: str, index: int) -> list[bytes]:
        size = self.page_parts[0] if kind == "page" else self.state_parts[0]
        return [self.contents.get((kind, index), bytes(size))]

    def write_cache(self, kind: str, index: int, contents: bytes) -> bool:
        self.contents[kind, index] = contents
        return True


@dataclass
class Engine:
    """What an engine has of a store, without a model."""

    folder: Path
    caches: Caches = field(default_factory=lambda: Caches(4096))
    state_pool: StatePool | None = None
    open_disk: Callable[[Path], PrefixDisk] = lambda folder: PrefixDisk(folder, 1 << 30)

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(EngineOptions(), PagePool(64, PAGE_SIZE), self.state_pool)
        self.memory = self.scheduler.queues.memory
        self.store = PrefixStore(
            lambda: self.open_disk(self.folder),
            self.memory,
            self.scheduler.pages,
            self.state_pool,
            cast(Runner, self.caches),
            1 << 29,
        )
        self.number = 0

    def sequence(self, prompt: list[int] = PROMPT) -> Sequence:
        """Return a new sequence as the engine loop gives it to `begin`."""
        self.number += 1
        sequence = Sequence(Generate(id=self.number, prompt=prompt, max_tokens=1, sampling=SamplingParams()))
        assert self.scheduler.check(sequence) is None
        return sequence

    def compute(self, sequence: Sequence) -> None:
        """Fill the cache with the pages of a sequence, which ends."""
        pages = (len(sequence.tokens) - 1) // PAGE_SIZE
        self.memory.extend_chain(sequence, pages)
        sequence.pages = self.scheduler.pages.take(pages)
        for page, page_hash in zip(sequence.pages, sequence.chain[1:], strict=True):
            self.scheduler.pages.register(page, page_hash)
        sequence.computed = pages * PAGE_SIZE

    def moved(self, *, ends: Callable[[], bool] | None = None) -> list[Sequence]:
        """Move pages until `ends`, or until a sequence is ready."""
        until = time.monotonic() + LIMIT_SECS
        while time.monotonic() < until:
            ready = self.store.move(idle=True)
            if ready or (ends is not None and ends()):
                return ready
            time.sleep(0.001)
        raise AssertionError("nothing happened")

    def save(self) -> None:
        """Save one computed prompt, and end."""
        sequence = self.sequence()
        self.compute(sequence)
        self.memory.release(sequence)
        self.store.close(LIMIT_SECS)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Callable[..., Engine]]:
    """Return new engines with a common disk, which has the pages of `PROMPT`."""
    Engine(tmp_path / "a").save()
    engines: list[Engine] = []

    def start(**options: Any) -> Engine:
        engines.append(Engine(tmp_path / "a", **options))
        return engines[-1]

    yield start
    for each in engines:
        each.store.close(0.0)


class SlowDisk(PrefixDisk):
    """A disk whose next reads wait until `answers` is set."""

    answers = threading.Event()

    def read(self, key: bytes) -> bytes | None:
        if key[:1] == PAGE:
            assert self.answers.wait(LIMIT_SECS)
        return super().read(key)


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Let the disks of `SlowDisk` wait for the returned event."""
    monkeypatch.setattr(SlowDisk, "answers", threading.Event())
    yield SlowDisk.answers
    SlowDisk.answers.set()


def slow(folder: Path) -> PrefixDisk:
    return SlowDisk(folder, 1 << 30)


def test_size_of_the_disk_is_reported_only_after_the_prefix_keys_are_known(engine: Callable[..., Engine]) -> None:
    """The engine reports its prefixes when the size changes, and then perhaps not again until a request arrives."""
    asked, may_answer = threading.Event(), threading.Event()

    class LateDisk(PrefixDisk):
        def names(self) -> dict[str, bytes]:
            asked.set()
            assert may_answer.wait(LIMIT_SECS)
            return super().names() | {"key": b"hash"}

    node = engine(open_disk=lambda folder: LateDisk(folder, 1 << 30))
    node.store.start()
    assert asked.wait(LIMIT_SECS)
    assert node.store.use.size == 0
    may_answer.set()
    node.moved(ends=lambda: node.store.use.size > 0)
    assert node.store.saved_prefixes["key"] == b"hash"


def test_engine_sends_heartbeats_while_it_waits_for_a_slow_disk(
    engine: Callable[..., Engine], slow_disk: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    beats: list[int] = []
    monkeypatch.setattr(heartbeat, "beat", lambda: beats.append(1))
    node = engine(open_disk=slow)
    sequence = node.sequence()
    assert node.store.begin(sequence)
    node.moved(ends=lambda: len(beats) > 5)
    slow_disk.set()
    assert node.moved() == [sequence]
    assert node.memory.cached_pages(sequence) == 6


def test_prompt_is_computed_if_the_disk_does_not_respond(
    engine: Callable[..., Engine], slow_disk: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix_save_and_restore, "_SILENT_SECS", 0.05)
    node = engine(open_disk=slow)
    sequences = [node.sequence(), node.sequence()]
    assert [node.store.begin(sequence) for sequence in sequences] == [True, True]
    assert node.moved() == sequences
    assert len(node.store) == 0
    assert not node.store.begin(node.sequence())  # no further prompt waits for this disk
    slow_disk.set()
    node.moved(ends=lambda: not node.store._silent)
    again = node.sequence()
    assert node.store.begin(again)
    assert node.moved() == [again]


def test_measured_disk_speed_excludes_the_time_the_reader_waits_for_the_engine_loop(
    engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loop that takes few records at a time keeps the reader waiting."""
    node = engine()
    node.store._reader.records.maxsize = 1
    now, given, hand_over = [0.0], [0], node.store._reader._hand_over

    def handed_over(record: Any) -> None:
        given[0] += 1
        hand_over(record)

    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(node.store._reader, "_hand_over", handed_over)
    sequence = node.sequence()
    assert node.store.begin(sequence)
    while given[0] < 2:  # the first record fills the queue, the second one waits
        time.sleep(0.001)
    now[0] = 100.0
    assert node.moved() == [sequence]
    assert node.store.use.read_bytes == 6 * 4096 and node.store.use.read_ms == 0


def test_slow_first_read_from_disk_does_not_disable_later_reads(engine: Callable[..., Engine]) -> None:
    node = engine()
    node.store.learn(PAGE_SIZE, PAGE_SIZE * 1e-5)
    node.store._reader.bytes_per_sec = 1e3  # a disk that had to spin up
    until = time.monotonic() + LIMIT_SECS
    while not node.store.begin(sequence := node.sequence()):
        assert time.monotonic() < until
        node.moved(ends=lambda: not node.store._probing)
    assert node.moved() == [sequence]


def test_decision_to_read_from_disk_counts_the_bytes_of_state_snapshots(tmp_path: Path) -> None:
    states = StatePool(2, 4)
    node = Engine(tmp_path / "a", Caches(4096, 1 << 20), states)
    sequence = node.sequence()
    node.compute(sequence)
    slot = states.reserve()
    assert slot is not None
    states.register(slot, sequence.chain[6], 6)
    node.memory.release(sequence)
    node.store.close(LIMIT_SECS)
    node = Engine(tmp_path / "a", Caches(4096, 1 << 20), StatePool(2, 4))
    node.store.learn(PAGE_SIZE, PAGE_SIZE * 1e-3)  # 96 tokens take 0.096 s
    node.store._reader.bytes_per_sec = 1e6  # six pages take 0.025 s, the snapshot takes 1 s
    assert not node.store.begin(node.sequence())
    node.store._reader.bytes_per_sec = 1e8
    assert node.store.begin(node.sequence())
    node.store.close(0.0)


def test_number_of_buffered_snapshot_copies_is_bounded_by_their_bytes(tmp_path: Path) -> None:
    store = Engine(tmp_path / "a", Caches(4096, 24 << 20), StatePool(2, 4)).store
    assert store._depth == 2 and store._reader.records.maxsize == 2
    store.close(0.0)


def test_pages_of_a_request_with_non_finite_values_are_removed_from_disk(engine: Callable[..., Engine]) -> None:
    node = engine()
    sequence = node.sequence()
    assert node.store.begin(sequence)
    assert node.moved() == [sequence]
    sequence.pages = node.memory.computed_before(sequence)
    node.scheduler.pages.share(sequence.pages)
    node.memory.discard(sequence)
    node.store.close(LIMIT_SECS)
    assert not engine().store.begin(node.sequence())
