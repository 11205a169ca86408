"""Input of one step as plain arrays, and the device buffers that hold it."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from helexa.neuron import tensors
from helexa.neuron.ops.batch import Batch, Bucket, Capacity, SpanTable
from helexa.neuron.ops.kernel_header import MAX_DRAFTS
from helexa.neuron.ops.sampling import Sampling
from helexa.neuron.tensors import Device, Tensor

Int32: TypeAlias = NDArray[np.int32]
Float32: TypeAlias = NDArray[np.float32]

_MOST_DRAFTING = 4  # maximum number of sequences in a captured graph with drafts

MAX_DRAFT_ROWS = 1 + MAX_DRAFTS  # Maximum number of rows (tokens) of a sequence in a step with drafts

_ALIGNED = 16  # every array starts at a multiple of this many numbers, so that kernels can read several numbers at once
_AXES = 3  # maximum number of position axes (M-RoPE)
_NOWHERE = -1  # KV slot of padding rows


def int32(values: Any = ()) -> Int32:
    """Return `values` as an int32 array."""
    return np.array(values, np.int32)


class HiddenRows(msgspec.Struct, frozen=True):
    """Rows whose hidden states an embedding, prompt scores or a draft head need."""

    sequence: int  # id of the sequence
    count: int  # number of rows of this sequence. The rows of the next object in the list follow.
    # int32 [count], the prompt token that follows each row, whose log-probability is needed; None if the hidden states
    # are summed for an embedding
    followers: Int32 | None = None
    alternatives: int = 0  # number of likeliest tokens to report with each log-probability
    kept: bool = False  # whether only a draft head needs the hidden states
    weights: Float32 | None = None  # float32 [count], factors of the summed hidden states; None for factors of 1
    takes_maximum: bool = False  # whether an embedding needs the maximum of the hidden states in place of their sum


class StepInput(msgspec.Struct, frozen=True):
    """The input of one step: everything that a runner needs to compute it.

    `ops.batch.Batch` describes the fields without a description here. The step has T rows (tokens) of B sequences. The
    logits of S rows are needed for sampling. The hidden states of P rows are needed for embeddings or prompt
    log-probabilities. W is the number of KV pages of the longest sequence, and H the hidden size.
    """

    # int32 [T], token ids. A negative number is a placeholder for a token that is not known yet. It is an index into
    # the tokens that the previous step samples: -1 is the last sampled token.
    tokens: Int32
    positions: Int32  # int32 [T] or [3, T]
    slots: Int32  # int32 [T]
    sample_rows: Int32  # int32 [S + P]
    starts: Int32  # int32 [B + 1]
    # int32 [B]
    prefixes: Int32
    settled: Int32
    state_slots: Int32
    pages: Int32  # int32 [B, W]
    # the sequences to which the P rows belong, in order
    hidden: list[HiddenRows] = msgspec.field(default_factory=list[HiddenRows])
    # sampling settings of the S rows; None if S is 0 or if the caller needs only logits
    sampling: Sampling | None = None
    # int32 [N, 2], pairs (source slot, target slot) of N recurrent states to copy. `restores` are copied before the
    # step, `saves` after the step.
    restores: Int32 = msgspec.field(default_factory=lambda: np.empty((0, 2), np.int32))
    saves: Int32 = msgspec.field(default_factory=lambda: np.empty((0, 2), np.int32))
    bucket: Bucket | None = None  # size of the captured graph that computes the step; None to run without a graph
    embeddings: Float32 | None = None  # float32 [E, H], inputs of the first layer that replace the embeddings of tokens
    embedding_rows: Int32 | None = None  # int32 [E], the rows whose embeddings are replaced
    # float32 [D, E, H], numbers to add to the hidden states of these rows after the first D layers
    deepstack: Float32 | None = None
    # int32 [T], number of tokens of its sequence that each row attends to; None for causal attention
    attention_ends: Int32 | None = None
    # int32 [B, W] and [T], pages and slots in the caches of layers with a sliding window; None if they are the same
    window_pages: Int32 | None = None
    window_slots: Int32 | None = None

    @property
    def pooled(self) -> int:
        """P, the number of rows whose hidden states are needed (all `HiddenRows`)."""
        return sum(rows.count for rows in self.hidden)

    @property
    def samples(self) -> int:
        """S, the number of rows whose logits are needed for sampling."""
        return len(self.sample_rows) - self.pooled

    @classmethod
    def blank(cls, bucket: Bucket) -> "StepInput":
        """Return an input of padding only, with the size of `bucket`."""
        none, start = int32(), np.zeros(1, np.int32)
        return cls(none, none, none, none, start, none, none, none, np.empty((0, 1), np.int32), bucket=bucket)


def encode(value: Any) -> bytes:
    """Return `value`, a `StepInput` or a `StepOutput`, as msgpack bytes."""
    return msgspec.msgpack.encode(value, enc_hook=_plain)


def decode_input(data: bytes) -> StepInput:
    """Return the step input that `encode` has turned into the bytes `data`.

    Raises:
        msgspec.DecodeError: the bytes are not a step input.
    """
    return msgspec.msgpack.decode(data, type=StepInput, dec_hook=array_of)


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    raise NotImplementedError(f"a step cannot contain a value of the type {type(value).__name__}")


def array_of(_: type, value: Any) -> NDArray[Any]:
    """Return the array that `encode` has stored as a list of dtype, shape and bytes."""
    dtype, shape, data = value
    # An array of objects from received bytes would be pointers chosen by the sender.
    if np.dtype(dtype).hasobject:
        raise ValueError(f"a step cannot contain an array of objects (dtype {dtype!r})")
    # A copy, because an array over `bytes` is read-only.
    return np.frombuffer(bytearray(data), dtype).reshape(shape)


def buckets(most: int, drafting: int = 0) -> list[Bucket]:
    """Return the sizes of steps for which graphs are captured, sizes with drafts last.

    Args:
        most: maximum number of sequences in a decode step without drafts.
        drafting: maximum number of sequences in a decode step with drafts, of which at most `_MOST_DRAFTING` count; 0
            for no sizes with drafts.
    """
    # Small sizes have small gaps, because padding rows cost small batches most. Large sizes have larger gaps, because
    # each graph needs memory.
    sizes = [size for size in (1, 2, 4, *range(8, 128, 8), *range(128, most, 32)) if size < most] + [most]
    drafting = min(drafting, most, _MOST_DRAFTING)
    draft_rows = [rows for rows in (8, 16, 32) if drafting < rows < drafting * MAX_DRAFT_ROWS] + [
        drafting * MAX_DRAFT_ROWS
    ] * bool(drafting)
    return [Bucket(size, size) for size in sizes] + [Bucket(rows, drafting) for rows in draft_rows]


def fitting(rows: int, spans: int, longest: int, among: Sequence[Bucket]) -> Bucket | None:
    """Return the first bucket that fits a step input; None if all are too small.

    Args:
        rows, spans: number of rows (tokens) and of spans (sequences) of the step.
        longest: number of rows of the longest span of the step.
        among: the available buckets in order of preference.
    """
    for bucket in among:
        max_span_rows = 1 if bucket.rows == bucket.spans else MAX_DRAFT_ROWS
        if longest <= max_span_rows and spans <= bucket.spans and rows <= bucket.rows:
            return bucket
    return None


class StepBuffers:
    """Copies step inputs to fixed addresses, and returns batches for kernels.

    Captured graphs require that batches of the same shape have the same addresses.

    Args:
        capacity: size of the largest batch.
        packed: True for a GPU. The arrays of a step are then adjacent in pinned host memory, and batches are padded to
            their buckets. If False, host and device share memory, and the span arrays are not copied.
    """

    def __init__(self, capacity: Capacity, device: Device, packed: bool) -> None:
        self._capacity = capacity
        self._packed = packed
        # If nothing is copied to a device, kernels read the span arrays of the step itself, which then need no space.
        spans = capacity.sequences if packed else 0
        sizes = (*[capacity.rows] * (4 + _AXES), *[spans + 1] * 4, spans * _rounded(capacity.pages_per_sequence))
        size = sum(_rounded(array_size) for array_size in sizes)
        pinned = packed and device.type == "cuda"
        memory = {"pin_memory": True} if pinned else {}
        # Two host buffers if packed: the device may still copy from one buffer while the host fills the other.
        self._hosts = [tensors.zeros(size, dtype=tensors.int32, **memory) for _ in range(1 + packed)]
        self._copied = [tensors.cuda.Event() for _ in self._hosts] if pinned else []
        self._device = tensors.zeros(size, dtype=tensors.int32, device=device) if packed else self._hosts[0]
        self._turn = 0

    def load(self, step: StepInput) -> Batch:
        """Copy a step input to the buffers; return a batch, valid until the next call."""
        bucket, capacity = step.bucket, self._capacity
        if bucket is None:
            rows, samples, (spans, width) = len(step.tokens), len(step.sample_rows), step.pages.shape
            lengths = np.diff(step.starts)
            singles = spans if rows == spans else int(np.count_nonzero(lengths == 1))
            most_rows = int(lengths[singles:].max()) if singles < spans else 0
        else:
            (rows, spans), samples, width = bucket, bucket.rows, capacity.pages_per_sequence
            singles = spans if rows == spans else 0
            most_rows = 0 if singles else MAX_DRAFT_ROWS
        axes = step.positions.shape[:-1]
        layout = _Layout(self._next_host(), self._device, self._packed)
        tokens = layout.add(step.tokens, rows, capacity.rows)
        slots = layout.add(step.slots, rows, capacity.rows, _NOWHERE)
        sample_rows = layout.add(step.sample_rows, samples, capacity.rows)
        positions = layout.add(step.positions.ravel(), rows * (*axes, 1)[0], capacity.rows * _AXES)
        window_slots = None
        if step.window_slots is not None:
            window_slots = layout.add(step.window_slots, rows, capacity.rows, _NOWHERE)
        table = None
        if self._packed:
            table = SpanTable(
                starts=layout.add(step.starts, spans + 1, capacity.sequences + 1, int(step.starts[-1])),
                prefixes=layout.add(step.prefixes, spans, capacity.sequences),
                settled=layout.add(step.settled, spans, capacity.sequences),
                state_slots=layout.add(step.state_slots, spans, capacity.sequences),
                pages=layout.add_table(step.pages, spans, _rounded(width)),
            )
            layout.send()
        # Mark the end of the copy. The second call after this one waits for this mark before it overwrites the buffer.
        if self._copied:
            self._copied[self._turn].record()
        on_device = self._device.device
        return Batch(
            tokens=tokens,
            positions=positions.view(*axes, rows),
            slots=slots,
            sample_rows=sample_rows,
            host_spans=SpanTable(step.starts, step.prefixes, step.settled, step.state_slots, step.pages),
            device_spans=table,
            singles=singles,
            most_rows=most_rows,
            samples=step.samples,
            pooled=step.pooled,
            capacity=capacity,
            bucket=bucket,
            embeddings=_on_device(step.embeddings, on_device),
            embedding_rows=_on_device(step.embedding_rows, on_device),
            deepstack=_on_device(step.deepstack, on_device),
            attention_ends=step.attention_ends,
            window_slots=window_slots,
            window_pages=step.window_pages,
        )

    def _next_host(self) -> Tensor:
        self._turn = (self._turn + 1) % len(self._hosts)
        if self._copied:
            self._copied[self._turn].synchronize()
        return self._hosts[self._turn]


def _on_device(array: NDArray[Any] | None, device: Device) -> Tensor | None:
    return None if array is None else tensors.from_numpy(array).to(device)


class _Layout:
    """Writes arrays one after another, at equal offsets on host and device."""

    def __init__(self, host: Tensor, device: Tensor, packed: bool) -> None:
        # Packed arrays follow each other directly. Otherwise each array has the same offset in all steps, because its
        # maximum size is reserved.
        self._host, self._device, self._packed = host, device, packed
        self._numbers: Int32 = host.numpy()
        self._end = 0

    def add(self, values: Int32, size: int, most: int, filler: int = 0) -> Tensor:
        """Copy an array to the host buffer; return its view of the device buffer.

        Args:
            size: size to which the array is padded with `filler`.
            most: maximum size of this array in any step.
        """
        start, count = self._end, len(values)
        self._end += _rounded(size if self._packed else most)
        self._numbers[start : start + count] = values
        if count < size:
            self._numbers[start + count : start + size] = filler
        return self._device[start : start + size]

    def add_table(self, values: Int32, lines: int, width: int) -> Tensor:
        """Copy the table `values` to the host buffer; return its view on the device.

        The table must be the last array of the step. The view has the shape [lines, width]. Numbers beyond the lines
        and columns of `values` are undefined.
        """
        start, count = self._end, lines * width
        self._end += count
        self._numbers[start : self._end].reshape(lines, width)[: len(values), : values.shape[1]] = values
        return self._device[start : self._end].view(lines, width)

    def send(self) -> None:
        """Copy all arrays to the device in one transfer."""
        self._device[: self._end].copy_(self._host[: self._end], non_blocking=True)


def _rounded(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED
