"""The input of one step as plain arrays. It contains all that a runner needs, so another process could compute it."""

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
    """Changes of one kind to N single logits, for example a logit bias.

    Attributes:
        rows, tokens: int32 [N], row and token of each changed logit. A negative token stands for an unknown token: an
            index, from the end, into the tokens that the previous step samples.
        values: float32 [N], operand of each change, for example the number to add.
    """

    rows: Int32 = msgspec.field(default_factory=_none)
    tokens: Int32 = msgspec.field(default_factory=_none)
    values: Float32 = msgspec.field(default_factory=lambda: np.empty(0, np.float32))


class Sampling(msgspec.Struct, frozen=True):
    """Sampling settings for each of S rows of logits.

    Attributes:
        temperature, top_k, top_p, min_p: float32 [S]; temperature 0 is greedy.
        seeds: uint64 [S].
        positions: int64 [S], positions of the tokens to sample. Seed and position determine a row's random number.
        logprobs: row -> number of alternatives to report with the token's log-probability. Rows that request no
            log-probabilities have no entry.
        bias: adjustments whose values are added to logits.
        repetition: adjustments whose values divide positive logits and multiply the other logits.
        presence: adjustments whose values are subtracted from logits.
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
    """The rows of one sequence among the P rows of a step whose hidden states are needed.

    The hidden states are either summed for an embedding, or become log-probabilities of prompt tokens.

    Attributes:
        sequence: id of the sequence.
        count: number of rows. They follow the rows of the previous `HiddenRows` of the step.
        followers: int32 [count], the prompt token after each row, whose log-probability is needed; None for the sum.
        alternatives: number of likeliest tokens to report with each log-probability.
    """

    sequence: int
    count: int
    followers: Int32 | None = None
    alternatives: int = 0


class StepInput(msgspec.Struct, frozen=True):
    """The input of one step. `ops.batch.Batch` describes the fields that are not described here.

    The step has T rows (tokens) of B sequences. S rows sample, and the hidden states of P rows are needed.

    Attributes:
        tokens: int32 [T]. A negative token stands for an unknown token: it is an index, from the end, into the tokens
            that the previous step samples.
        positions: int32 [T] or [3, T].
        slots: int32 [T].
        sample_rows: int32 [S + P].
        starts: int32 [B + 1].
        prefixes, settled, state_slots: int32 [B].
        pages: int32 [B, W].
        hidden: the sequences to which the P rows belong.
        sampling: sampling settings of the S rows; None if S is 0 or if the caller needs only logits.
        restores, saves: int32 [N, 2], pairs (source slot, target slot) of recurrent states to copy. `restores` are
            copied before the step, `saves` after the step.
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
        """Return a step of size `bucket` in which all rows are padding."""
        none, start = _none(), np.zeros(1, np.int32)
        return cls(none, none, none, none, start, none, none, none, np.empty((0, 1), np.int32), bucket=bucket)


def encode(value: Any) -> bytes:
    """Return the input or the output of a step, `StepInput` or `StepOutput`, as bytes."""
    return msgspec.msgpack.encode(value, enc_hook=_plain)


def decode_input(data: bytes) -> StepInput:
    """Return the step input whose encoding by `encode` is `data`.

    Raises:
        msgspec.ValidationError: the bytes are not a step input.
    """
    return msgspec.msgpack.decode(data, type=StepInput, dec_hook=array_of)


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    raise NotImplementedError(f"{type(value)} in a step")


def array_of(_: type, value: Any) -> NDArray[Any]:
    """Return the array that `encode` has encoded as the plain value `value`."""
    dtype, shape, data = value
    if np.dtype(dtype).hasobject:
        raise ValueError("an array of objects in a step")
    return np.frombuffer(bytearray(data), dtype).reshape(shape)
