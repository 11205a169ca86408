"""The plan log: all inputs of a scheduler, and the plans that it made.

`recorded_scheduler` writes a log. `replay` compares the logged plans with the plans of a new scheduler. A log holds
token ids, but no text, no grammars and no names: principals are numbered.
"""

import zlib
from array import array
from collections.abc import Iterator
from pathlib import Path

import msgspec

from helexa.neuron.engine.ipc.messages import Cancel, EngineOptions, Generate
from helexa.neuron.engine.kv_cache.page_pool import PagePool
from helexa.neuron.engine.kv_cache.state_pool import StatePool
from helexa.neuron.engine.scheduling.plan import Plan
from helexa.neuron.engine.scheduling.step_controller import StepController

_LENGTH_BYTES = 4


class Setup(msgspec.Struct, frozen=True, kw_only=True, tag="setup"):
    """The configuration of a scheduler; the first record of a log.

    Attributes:
        pages: number of pages of the KV cache.
        page_size: positions per page.
        snapshots: snapshot slots for recurrent state; None for a model without recurrent layers.
        step_seconds: seconds without progress after which the engine counts as hung.
        token_seconds: measured seconds of a step with one token; 0 if not measured.
    """

    options: EngineOptions
    pages: int
    page_size: int
    snapshots: int | None = None
    step_seconds: float = float("inf")
    token_seconds: float = 0.0

    def arguments(self) -> tuple[EngineOptions, PagePool, StatePool | None, StepController]:
        """Return new constructor arguments for a scheduler."""
        states = None if self.snapshots is None else StatePool(self.options.max_sequences, self.snapshots)
        controller = StepController(self.options, self.step_seconds, self.token_seconds)
        return self.options, PagePool(self.pages, self.page_size), states, controller


class Added(msgspec.Struct, frozen=True, kw_only=True, tag="added", omit_defaults=True):
    """A request arrived.

    Attributes:
        pooled: the request asks for an embedding.
        guided: the request has a grammar.
    """

    request: Generate
    pooled: bool = False
    guided: bool = False


class PlannedEntry(msgspec.Struct, frozen=True, array_like=True):
    """The record of a `PlanEntry`.

    Attributes:
        guessed: the drafts come from a drafter, not from a grammar.
        pages: CRC-32 checksum of the sequence's page numbers.
    """

    id: int
    computed: int
    count: int
    drafts: tuple[int, ...]
    guessed: bool
    restore: int | None
    save: int | None
    slot: int | None
    pages: int


class Planned(msgspec.Struct, frozen=True, kw_only=True, tag="planned", omit_defaults=True):
    """A plan; `Scheduler.plan_after` made it if `ahead`."""

    entries: list[PlannedEntry]
    ahead: bool = False

    @classmethod
    def from_plan(cls, plan: Plan, *, ahead: bool) -> "Planned":
        """Return the record of a plan. Call it before the plan's sequences change."""
        return cls(
            entries=[
                PlannedEntry(
                    entry.sequence.id,
                    entry.sequence.computed,
                    entry.count,
                    entry.drafts,
                    entry.drafter is not None,
                    entry.restore,
                    entry.save,
                    entry.sequence.slot,
                    zlib.crc32(array("I", entry.sequence.pages)),
                )
                for entry in plan
            ],
            ahead=ahead,
        )


class GrammarResult(msgspec.Struct, frozen=True, array_like=True):
    """The effect of a step's tokens on the grammar of a sequence.

    Attributes:
        ahead: `GrammarMatcher.ahead` after the tokens were checked.
        kept: number of tokens that were appended to the sequence.
        ended: the grammar is complete.
        failed: the sequence ended with a grammar error.
    """

    id: int
    ahead: int
    kept: int
    ended: bool
    failed: bool


class Finished(msgspec.Struct, frozen=True, kw_only=True, tag="finished", omit_defaults=True):
    """The oldest step in flight was committed.

    Attributes:
        sampled, seconds: arguments of `Scheduler.commit`.
        grammars: one result per sequence with a grammar.
        not_finite: ids of sequences that ended because of non-finite values.
    """

    sampled: list[int]
    seconds: float | None
    grammars: list[GrammarResult] = []
    not_finite: list[int] = []


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The oldest step in flight failed, and the step launched after it was dropped."""


Record = Setup | Added | Cancel | Planned | Finished | Failed


def encode(record: Record) -> bytes:
    """Return the bytes of a record: length (4 bytes, little-endian) and msgpack body."""
    body = msgspec.msgpack.encode(record)
    return len(body).to_bytes(_LENGTH_BYTES, "little") + body


def read(path: Path) -> Iterator[Record]:
    """Yield the records of a log up to the last complete one.

    Raises:
        OSError: the file cannot be read.
        msgspec.DecodeError: the file is not a plan log.
    """
    decoder = msgspec.msgpack.Decoder(Record)
    with path.open("rb") as file:
        while len(head := file.read(_LENGTH_BYTES)) == _LENGTH_BYTES:
            length = int.from_bytes(head, "little")
            if len(body := file.read(length)) == length:
                yield decoder.decode(body)
