"""The input of one step as plain arrays, which can be sent to another process and computed there."""

from typing import Any, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from helexa.neuron.ops.batch import Bucket

Int32: TypeAlias = NDArray[np.int32]
Float32: TypeAlias = NDArray[np.float32]


def int32(values: Any = ()) -> Int32:
    """An array of these numbers."""
    return np.array(values, np.int32)


def _none() -> Int32:
    return np.empty(0, np.int32)


class Adjustments(msgspec.Struct, frozen=True):
    """Numbers by which some logits are changed.

    Attributes:
        rows, tokens: int32 [N], whose logits. A token below 0 is the one at this place, counted from the end, among
            those that the step before samples.
        values: float32 [N].
    """

    rows: Int32 = msgspec.field(default_factory=_none)
    tokens: Int32 = msgspec.field(default_factory=_none)
    values: Float32 = msgspec.field(default_factory=lambda: np.empty(0, np.float32))


class Sampling(msgspec.Struct, frozen=True):
    """How a token is chosen for each of S rows of logits.

    Attributes:
        temperature, top_k, top_p, min_p: float32 [S]; a temperature of 0 takes the largest.
        seeds: uint64 [S].
        positions: int64 [S], of the tokens to be chosen. Seed and position determine a row's random number.
        logprobs: of the rows that ask, by row, how many alternatives to report with the token's log-probability.
        bias: is added.
        repetition: divides what is positive and multiplies what is negative.
        presence: is subtracted.
    """

    temperature: Float32
    top_k: Float32
    top_p: Float32
    min_p: Float32
    seeds: NDArray[np.uint64]
    positions: NDArray[np.int64]
    logprobs: dict[int, int]
    bias: Adjustments
    repetition: Adjustments
    presence: Adjustments


class HiddenRows(msgspec.Struct, frozen=True):
    """Rows of one sequence whose hidden states are summed up, or become log-probabilities of prompt tokens.

    Attributes:
        sequence: its id.
        count: how many of the step's rows, after those of the entries before.
        followers: int32 [count], the tokens whose log-probabilities are wanted; None for the sum.
        alternatives: how many likeliest tokens to report with each.
    """

    sequence: int
    count: int
    followers: Int32 | None = None
    alternatives: int = 0


class StepInput(msgspec.Struct, frozen=True):
    """One step: T rows of B sequences, S of which sample; see `ops.batch.Batch`.

    Attributes:
        tokens: int32 [T]. A token below 0 is the one at this place, counted from the end, among those that the step
            before samples.
        positions: int32 [T] or [3, T].
        slots: int32 [T].
        sample_rows: int32 [S + P].
        starts: int32 [B + 1].
        prefixes, settled, state_slots: int32 [B].
        pages: int32 [B, W].
        hidden: what the P rows are for.
        sampling: how the S rows sample; None if S is 0, or if their logits alone are wanted.
        restores, saves: int32 [N, 2], copies of recurrent state between slots, before and after the step.
        bucket: size of the recorded step that computes it, if there is such.
        embeddings: float32 [E, H], inputs of the first layer that replace the embeddings of tokens.
        embedding_rows: int32 [E], the rows that they replace.
    """

    tokens: Int32
    positions: Int32
    slots: Int32
    sample_rows: Int32
    starts: Int32
    prefixes: Int32
    settled: Int32
    state_slots: Int32
    pages: Int32
    hidden: list[HiddenRows] = msgspec.field(default_factory=list[HiddenRows])
    sampling: Sampling | None = None
    restores: Int32 = msgspec.field(default_factory=lambda: np.empty((0, 2), np.int32))
    saves: Int32 = msgspec.field(default_factory=lambda: np.empty((0, 2), np.int32))
    bucket: Bucket | None = None
    embeddings: Float32 | None = None
    embedding_rows: Int32 | None = None

    @property
    def pooled(self) -> int:
        """P, the rows whose hidden states are wanted."""
        return sum(rows.count for rows in self.hidden)

    @property
    def samples(self) -> int:
        """S, the rows whose logits are wanted."""
        return len(self.sample_rows) - self.pooled

    @classmethod
    def blank(cls, bucket: Bucket) -> "StepInput":
        """A step of this size that consists of padding."""
        none, start = _none(), np.zeros(1, np.int32)
        return cls(none, none, none, none, start, none, none, none, np.empty((0, 1), np.int32), bucket=bucket)


def encode(value: Any) -> bytes:
    """A step's input or output as bytes."""
    return msgspec.msgpack.encode(value, enc_hook=_plain)


def decode_input(data: bytes) -> StepInput:
    """What `encode` made of a step's input.

    Raises:
        msgspec.ValidationError: the bytes are something else.
    """
    return msgspec.msgpack.decode(data, type=StepInput, dec_hook=array_of)


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    raise NotImplementedError(f"{type(value)} in a step")


def array_of(_: type, value: Any) -> NDArray[Any]:
    """The array that `encode` made plain."""
    dtype, shape, data = value
    if np.dtype(dtype).hasobject:
        raise ValueError("an array of objects in a step")
    return np.frombuffer(bytearray(data), dtype).reshape(shape)
