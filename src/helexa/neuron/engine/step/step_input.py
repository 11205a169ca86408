"""The input of one step as plain arrays, which contain everything that a runner needs to compute the step."""

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
    """Adjustments of one kind, such as logit biases, to N single logits of a step.

    Attributes:
        rows, tokens: int32 [N], row and token id of each adjusted logit. A negative token id is a placeholder for a
            token that is not known yet. It is an index into the tokens that the previous step samples: -1 is the last
            of them.
        values: float32 [N], the operand of each adjustment, for example the number to add.
    """

    rows: Int32 = msgspec.field(default_factory=_none)
    tokens: Int32 = msgspec.field(default_factory=_none)
    values: Float32 = msgspec.field(default_factory=lambda: np.empty(0, np.float32))


class Sampling(msgspec.Struct, frozen=True):
    """Sampling settings for S rows of logits.

    Attributes:
        temperature, top_k, top_p, min_p: float32 [S]; temperature 0 is greedy.
        seeds: uint64 [S], seed of each row.
        positions: int64 [S], position of the token to sample. Seed and position determine the random number of a row.
        logprobs: number of likeliest tokens to report with the log-probability of the sampled token, by row. Rows that
            request no log-probabilities have no entry.
        bias: adjustments that add their values to logits.
        repetition: adjustments that divide positive logits by their values, and multiply other logits by their values.
        presence: adjustments that subtract their values from logits.
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
    """Rows of one sequence whose hidden states are needed, for an embedding or for log-probabilities of prompt tokens.

    A step has a list of these objects. P is the number of rows of the whole list.

    Attributes:
        sequence: id of the sequence.
        count: number of rows of this sequence. The rows of the next object in the list follow.
        followers: int32 [count], the prompt token that follows each row, whose log-probability is needed; None if the
            hidden states are summed for an embedding.
        alternatives: number of likeliest tokens to report with each log-probability.
    """

    sequence: int
    count: int
    followers: Int32 | None = None
    alternatives: int = 0


class StepInput(msgspec.Struct, frozen=True):
    """The input of one step. `ops.batch.Batch` describes the fields without a description here.

    The step has T rows (tokens) of B sequences. The logits of S rows are needed for sampling. The hidden states of P
    rows are needed for embeddings or prompt log-probabilities. W is the number of KV pages of the longest sequence, and
    H the hidden size.

    Attributes:
        tokens: int32 [T], token ids. A negative number is a placeholder for a token that is not known yet. It is an
            index into the tokens that the previous step samples: -1 is the last of them.
        positions: int32 [T] or [3, T].
        slots: int32 [T].
        sample_rows: int32 [S + P].
        starts: int32 [B + 1].
        prefixes, settled, state_slots: int32 [B].
        pages: int32 [B, W].
        hidden: the sequences to which the P rows belong, in order.
        sampling: sampling settings of the S rows; None if S is 0 or if the caller needs only logits.
        restores, saves: int32 [N, 2], pairs (source slot, target slot) of N recurrent states to copy. `restores` are
            copied before the step, `saves` after the step.
        bucket: size of the captured graph that computes the step; None to run without a graph.
        embeddings: float32 [E, H], inputs of the first layer that replace the embeddings of tokens.
        embedding_rows: int32 [E], the rows whose embeddings are replaced.
        deepstack: float32 [D, E, H], numbers to add to the hidden states of these rows after the first D layers.
        attention_ends: int32 [T], number of tokens of its sequence that each row attends to; None for causal attention.
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
    deepstack: Float32 | None = None
    attention_ends: Int32 | None = None

    @property
    def pooled(self) -> int:
        """P, the number of rows whose hidden states are needed for embeddings or prompt log-probabilities."""
        return sum(rows.count for rows in self.hidden)

    @property
    def samples(self) -> int:
        """S, the number of rows whose logits are needed for sampling."""
        return len(self.sample_rows) - self.pooled

    @classmethod
    def blank(cls, bucket: Bucket) -> "StepInput":
        """Return the input of a step that contains only padding, with the size of `bucket`."""
        none, start = _none(), np.zeros(1, np.int32)
        return cls(none, none, none, none, start, none, none, none, np.empty((0, 1), np.int32), bucket=bucket)


def encode(value: Any) -> bytes:
    """Return `value`, a `StepInput` or a `StepOutput`, as msgpack bytes."""
    return msgspec.msgpack.encode(value, enc_hook=_plain)


def decode_input(data: bytes) -> StepInput:
    """Return the step input that `encode` has turned into the bytes `data`.

    Raises:
        msgspec.ValidationError: the bytes are not a step input.
    """
    return msgspec.msgpack.decode(data, type=StepInput, dec_hook=array_of)


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    raise NotImplementedError(f"{type(value)} in a step")


def array_of(_: type, value: Any) -> NDArray[Any]:
    """Return the array that `encode` has turned into `value`, a list of dtype, shape and bytes."""
    dtype, shape, data = value
    if np.dtype(dtype).hasobject:
        raise ValueError("an array of objects in a step")
    return np.frombuffer(bytearray(data), dtype).reshape(shape)
