"""The records of a plan log, which contains all inputs of a scheduler and its plans.

The module `recorded_scheduler` writes a log. The module `replay` gives the inputs to a new scheduler, and compares the
new plans with the plans in the log. A log contains token ids, but no text, no grammars and no names: principals (API
key owners) are numbered.
"""

import zlib
from array import array
from collections.abc import Iterator
from pathlib import Path

import msgspec

from helexa.neuron.engine.ipc.engine_options import EngineOptions
from helexa.neuron.engine.ipc.messages import Cancel, Generate
from helexa.neuron.engine.kv_cache_and_prefix_hashes import PagePool, StatePool
from helexa.neuron.engine.scheduling.plan import Plan
from helexa.neuron.engine.scheduling.prompt_images import TEXT_TRAITS, ImageTraits
from helexa.neuron.engine.scheduling.step_limits_and_fair_share import StepController

_LENGTH_BYTES = 4


class Setup(msgspec.Struct, frozen=True, kw_only=True, tag="setup"):
    """The first record of a plan log: the configuration of the scheduler.

    Attributes:
        pages: number of pages of the KV cache.
        page_size: positions per page.
        snapshots: number of slots for snapshots of recurrent state; None for a model without recurrent layers.
        step_seconds: seconds without progress after which the engine counts as hung.
        token_seconds: measured seconds of a step with one token; 0 if not measured.
        image_traits: how the model treats the image tokens of prompts.
        window: largest sliding window of the layers, in positions; None if a sequence must keep all its KV pages.
    """

    options: EngineOptions
    pages: int
    page_size: int
    snapshots: int | None = None
    step_seconds: float = float("inf")
    token_seconds: float = 0.0
    image_traits: ImageTraits = TEXT_TRAITS
    window: int | None = None

    def arguments(self) -> tuple[EngineOptions, PagePool, StatePool | None, StepController, ImageTraits, int | None]:
        """Return the constructor arguments of a scheduler with this configuration, as new objects."""
        states = None if self.snapshots is None else StatePool(self.options.max_sequences, self.snapshots)
        controller = StepController(self.options, self.step_seconds, self.token_seconds)
        return self.options, PagePool(self.pages, self.page_size), states, controller, self.image_traits, self.window


class Added(msgspec.Struct, frozen=True, kw_only=True, tag="added", omit_defaults=True):
    """The record of a new request.

    Attributes:
        pooled: whether the request asks for an embedding.
        guided: whether the request has a grammar.
    """

    request: Generate
    pooled: bool = False
    guided: bool = False


class PlannedEntry(msgspec.Struct, frozen=True, array_like=True):
    """The record of a `PlanEntry`: the tokens of one sequence in a plan.

    Attributes:
        guessed: whether the drafts come from n-gram lookup. If False, the grammar forces the drafts, or there are none.
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
    """The record of a plan.

    Attributes:
        entries: the sequences of the plan.
        ahead: whether `Scheduler.plan_after` made the plan. If False, `Scheduler.plan` made it.
    """

    entries: list[PlannedEntry]
    ahead: bool = False

    @classmethod
    def from_plan(cls, plan: Plan, *, ahead: bool) -> "Planned":
        """Return the record of `plan`. It must be made before the plan's sequences change.

        Args:
            ahead: whether `Scheduler.plan_after` made the plan.
        """
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
    """The result of the grammar check of one sequence in a step.

    Attributes:
        ahead: value of `GrammarMatcher.ahead` after the sampled tokens were checked.
        kept: number of sampled tokens that were appended to the sequence.
        ended: whether the output is complete according to the grammar.
        failed: whether the sequence ended with a grammar error.
    """

    id: int
    ahead: int
    kept: int
    ended: bool
    failed: bool


class Finished(msgspec.Struct, frozen=True, kw_only=True, tag="finished", omit_defaults=True):
    """The record of a call of `Scheduler.commit` for the oldest step in flight.

    Attributes:
        sampled, seconds: arguments of `Scheduler.commit`.
        grammars: results of the grammar checks, for the sequences with a grammar.
        not_finite: ids of sequences that ended because their results were NaN or infinite.
    """

    sampled: list[int]
    seconds: float | None
    grammars: list[GrammarResult] = []
    not_finite: list[int] = []


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The record that the oldest step in flight failed. A step that was launched after the failed step is dropped."""


Record = Setup | Added | Cancel | Planned | Finished | Failed


def encode(record: Record) -> bytes:
    """Return the bytes of `record` in the log file: the length (4 bytes, little-endian), then the msgpack bytes."""
    body = msgspec.msgpack.encode(record)
    return len(body).to_bytes(_LENGTH_BYTES, "little") + body


def read(path: Path) -> Iterator[Record]:
    """Yield the records of the log file `path`. An incomplete record at the end of the file is ignored.

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
