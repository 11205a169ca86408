"""Recurrent states of one layer, and the order in which plain torch updates them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Self, TypeVar

from helexa.neuron.ops.batch import Batch, Span
from helexa.neuron.tensors import Tensor

_ROWS_AT_ONCE = 1024  # maximum rows of a sequence that are computed at once; limits the memory for long prompts


@dataclass(frozen=True)
class ConvCache:
    """The recurrent states of one layer: the past inputs of a convolution.

    Subclasses add tensors to the state. The first dimension of each tensor is the state slot. A slot contains the state
    of one running sequence, or a snapshot (saved copy) of a state.
    """

    conv: Tensor  # [slots, K - 1, C], the last inputs of the convolution over K tokens and C columns

    def copy(self, source: int, target: int) -> None:
        """Copy the recurrent state in the slot `source` to the slot `target`."""
        for tensor in self.parts():
            tensor[target] = tensor[source]

    def clear(self, slot: int) -> None:
        """Set the recurrent state in the slot `slot` to zero, for a new sequence."""
        for tensor in self.parts():
            tensor[slot] = 0

    def at(self, slot: int) -> Self:
        """Return a cache with only the slot `slot`, which shares the memory of this cache."""
        return type(self)(*(tensor[slot : slot + 1] for tensor in self.parts()))

    def clone(self) -> Self:
        """Return a copy of all slots in new memory."""
        return type(self)(*(tensor.clone() for tensor in self.parts()))

    def gather(self, slots: Tensor) -> Self:
        """Return a cache with copies of the B recurrent states in the slots `slots` [B]."""
        return type(self)(*(tensor.index_select(0, slots) for tensor in self.parts()))

    def scatter(self, slots: Tensor, states: Self) -> None:
        """Write the B states from `gather` back to the slots `slots`."""
        for tensor, values in zip(self.parts(), states.parts(), strict=True):
            tensor.index_copy_(0, slots, values)

    def parts(self) -> list[Tensor]:
        """Return the tensors of the cache."""
        return [getattr(self, field.name) for field in fields(self)]


@dataclass(frozen=True)
class MatrixCache(ConvCache):
    """The recurrent states of a layer with a convolution and one matrix per head.

    In Triton kernels of Gated DeltaNet, `conv` is a ring buffer [slots, K, C] of K tokens.
    """

    # float32 [slots, heads, N, P], the state matrix of each head, for keys of width N and values of width P
    state: Tensor


CacheType = TypeVar("CacheType", bound=ConvCache)


def advance_spans(
    advance: Callable[[list[Tensor], CacheType], Tensor],
    inputs: Sequence[Tensor],
    cache: CacheType,
    batch: Batch,
    out: Tensor,
    together: bool,
) -> None:
    """Update the states of all sequences of a batch, and write the results to `out`.

    A new sequence starts with a state of zeros. Only accepted tokens change a state, draft tokens do not (see
    `Span.settled`).

    Args:
        advance: function that computes T tokens of each of B sequences. Its arguments are the inputs [B, T, ..] and the
            states of the B sequences, which the function replaces. It returns the results [B, T, ..].
        inputs: tensors [R, ..] with one line for each of the R rows (tokens) of the batch, as in `out`.
        together: whether to compute the rows of all sequences with one row in one call of `advance`.
    """
    spans = batch.span_list
    for span in spans:
        if span.prefix == 0:
            cache.clear(span.slot)
    # On a GPU, computing the decode rows together needs few kernel launches. On a CPU, one sequence is computed at a
    # time, so that its state stays in the processor cache.
    if together and (count := batch.singles):
        slots = batch.spans.state_slots[:count].long()
        states = cache.gather(slots)
        out[:count] = advance([x[:count, None] for x in inputs], states)[:, 0]
        cache.scatter(slots, states)
        spans = spans[count:]
    for span in spans:
        for rows, state in _row_slices(span, cache):
            out[rows] = advance([x[None, rows] for x in inputs], state)[0]


def _row_slices(span: Span, cache: CacheType) -> Iterator[tuple[slice, CacheType]]:
    """Divide a span's rows into slices, each with the recurrent state to update."""
    state, settled = cache.at(span.slot), span.start + span.settled
    for start in range(span.start, settled, _ROWS_AT_ONCE):
        yield slice(start, min(start + _ROWS_AT_ONCE, settled)), state
    # Draft tokens may be rejected. They therefore change only a copy of the state.
    if settled < span.stop:
        yield slice(settled, span.stop), state.clone()
