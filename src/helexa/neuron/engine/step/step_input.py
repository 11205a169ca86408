"""The input of one step as plain arrays, which another process could receive and compute."""

from typing import Any, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from helexa.neuron.ops.batch import Bucket

Int32: TypeAlias = NDArray[np.int32]
Float32: TypeAlias = NDArray[np.float32]


def int32(values: Any = ()) -> Int32:
    """Return `values` as an int32 array."""
    return np.array(values, np.int32)


def _none() -> Int32:
    return np.empty(0, np.int32)


class Adjustments(msgspec.Struct, frozen=True):
    """Changes to some logits.

    Attributes:
        rows, tokens: int32 [N], row and token of each logit. A negative token is an index from the end of the tokens
            that the previous step samples.
        values: float32 [N], operands of the change.
    """

    rows: Int32 = msgspec.field(default_factory=_none)
    tokens: Int32 = msgspec.field(default_factory=_none)
    values: Float32 = msgspec.field(default_factory=lambda: np.empty(0, np.float32))


class Sampling(msgspec.Struct, frozen=True):
    """How a token is chosen for each of S rows of logits.

    Attributes:
        temperature, top_k, top_p, min_p: float32 [S]; temperature 0 is greedy.
        seeds: uint64 [S].
        positions: int64 [S], positions of the tokens to choose. Seed and position determine a row's random number.
        logprobs: row -> number of alternatives to report with the token's log-probability, for rows that request them.
        bias: values are added to logits.
        repetition: values divide positive logits and multiply others.
        presence: values are subtracted from logits.
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
    """Rows of one sequence whose hidden states are summed, or become log-probabilities of prompt tokens.

    Attributes:
        sequence: id of the sequence.
        count: number of rows, which follow the rows of the previous entries.
        followers: int32 [count], the tokens whose log-probabilities are needed; None for the sum.
        alternatives: number of likeliest tokens to report with each log-probability.
    """

    sequence: int
    count: int
    followers: Int32 | None = None
    alternatives: int = 0


class StepInput(msgspec.Struct, frozen=True):
    """One step: T rows of B sequences, S of which sample and P of which need hidden states; see `ops.batch.Batch`.

    Attributes:
        tokens: int32 [T]. A negative token is an index from the end of the tokens that the previous step samples.
        positions: int32 [T] or [3, T].
        slots: int32 [T].
        sample_rows: int32 [S + P].
        starts: int32 [B + 1].
        prefixes, settled, state_slots: int32 [B].
        pages: int32 [B, W].
        hidden: the sequences of the P rows.
        sampling: how the S rows sample; None if S is 0 or if the caller needs only logits.
        restores, saves: int32 [N, 2], (source, target) slots of recurrent state that is copied before and after the
            step.
        bucket: size of the captured graph that computes the step; None to run without a graph.
        embeddings: float32 [E, H], inputs of the first layer that replace the embeddings of tokens.
        embedding_rows: int32 [E], the rows whose embeddings are replaced.
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
        """P, the number of rows whose hidden states are needed."""
        return sum(rows.count for rows in self.hidden)

    @property
    def samples(self) -> int:
        """S, the number of rows whose logits are needed."""
        return len(self.sample_rows) - self.pooled

    @classmethod
    def blank(cls, bucket: Bucket) -> "StepInput":
        """Return a step of size `bucket` that consists of padding."""
        none, start = _none(), np.zeros(1, np.int32)
        return cls(none, none, none, none, start, none, none, none, np.empty((0, 1), np.int32), bucket=bucket)


def encode(value: Any) -> bytes:
    """Return the input or output of a step as bytes."""
    return msgspec.msgpack.encode(value, enc_hook=_plain)


def decode_input(data: bytes) -> StepInput:
    """Return the step input that `encode` turned into `data`.

    Raises:
        msgspec.ValidationError: the bytes are not a step input.
    """
    return msgspec.msgpack.decode(data, type=StepInput, dec_hook=array_of)


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    raise NotImplementedError(f"{type(value)} in a step")


def array_of(_: type, value: Any) -> NDArray[Any]:
    """Return the array that `encode` turned into a plain value."""
    dtype, shape, data = value
    if np.dtype(dtype).hasobject:
        raise ValueError("an array of objects in a step")
    return np.frombuffer(bytearray(data), dtype).reshape(shape)
