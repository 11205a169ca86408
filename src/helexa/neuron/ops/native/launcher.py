"""Launch of native kernels, and allocation of memory for their results."""

from helexa.neuron import tensors
from helexa.neuron.ops.kernel_header import (
    BLOCK_BYTES,
    EXCHANGE_BYTES,
    GELU,
    GELU_TANH,
    GROUP,
    RELU2,
    SILU,
    SPARE_BLOCKS,
)
from helexa.neuron.ops.native.captured_graph import Graphs, Workspace
from helexa.neuron.ops.native.kernel_library import Argument
from helexa.neuron.ops.rank_group_and_shares import SINGLE, RankGroup, Shares
from helexa.neuron.tensors import DType, Tensor

GATES = {None: 0, "silu": SILU, "gelu_tanh": GELU_TANH}  # Codes of the gates in kernels.h, by name

# Codes of the activations in kernels.h, by name.
ACTIVATIONS = {"silu": SILU, "gelu_tanh": GELU_TANH, "gelu": GELU, "relu2": RELU2}

NO_WINDOW = 1 << 40  # Sliding window of layers in which a query attends to all positions


class Launcher:
    """Runs kernels and allocates memory for their results, for all native operators."""

    def __init__(self, workspace: Workspace, graphs: Graphs, x_bits: int) -> None:
        self.x_bits = x_bits  # bits to which products with quantized weights round activations: 16, 8 or MIXED
        self._workspace = workspace
        self._graphs = graphs
        self._ranks = SINGLE
        self._shared = tensors.empty(0, dtype=tensors.uint8)

    def share(self, memory: Tensor, ranks: RankGroup) -> None:
        """Set the ranks' shared memory, uint8 in the layout of `kernels/all_reduce.c`."""
        self._shared, self._ranks = memory, ranks

    def take(self, *shape: int, dtype: DType | None = None) -> Tensor:
        """Return an uninitialized temporary tensor, float32 by default."""
        return self._workspace.take(*shape, dtype=dtype)

    def take_rounded(self, rows: int, columns: int) -> Tensor:
        """Return uninitialized memory for the activations [rows, columns] after rounding."""
        blocks = rows * columns // GROUP + SPARE_BLOCKS
        return self._workspace.take(blocks * BLOCK_BYTES, dtype=tensors.uint8)

    def launch(self, kernel: str, waits: bool = True, /, **arguments: Argument) -> None:
        """Run a kernel (see `KernelLibrary.instruction`), or record it during a capture."""
        self._graphs.launch(kernel, waits, arguments)

    def gate_mul(self, gate_up: Tensor, gate: str) -> Tensor:
        """Return `gate(first half) * second half` of `gate_up` [rows, 2 * width]."""
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = self.take(rows, width)
        self.launch("gate_mul", x=gate_up, out=out, rows=rows, width=width, gate=GATES[gate])
        return out

    def activate(self, x: Tensor, activation: str) -> Tensor:
        """Return the activation of each number of x [rows, width], computed in place."""
        rows, width = x.shape
        self.launch("activate", x=x, rows=rows, width=width, activation=ACTIVATIONS[activation])
        return x

    def gather(self, x: Tensor, shares: Shares) -> Tensor:
        """Return the columns of all ranks, [T, `shares.total`] (all-gather)."""
        rows, stride = x.shape[0], shares.total
        out = self.take(rows, stride)
        at_once = EXCHANGE_BYTES // (4 * stride)
        x = x.contiguous()
        # The rows may not fit into the shared memory at once.
        for start in range(0, rows, at_once):
            count = min(at_once, rows - start)
            size = {"shared": self._shared, "rows": count, "stride": stride}
            own = {"x": x[start : start + count], "width": len(shares.own), "first": shares.own.start}
            self.launch("publish", **own, **size)
            self.launch("meet_ranks", shared=self._shared, rank=self._ranks.rank, ranks=self._ranks.count)
            self.launch("collect", out=out[start : start + count], **size)
        return out

    def sum_ranks(self, x: Tensor) -> Tensor:
        """Return the sum of x [rows, hidden] over all ranks, in rank order (all-reduce)."""
        rows, count = x.shape[0], self._ranks.count
        everything = self.gather(x, Shares.split(count, count, self._ranks.rank).times(x.shape[1]))
        places = tensors.arange(rows * count).view(rows, count)
        return self.sum_pairs(everything.view(rows * count, x.shape[1]), places, tensors.ones(rows, count))

    def sum_pairs(self, x: Tensor, places: Tensor, weights: Tensor) -> Tensor:
        """Return weighted sums of rows of x [pairs, hidden], as [rows, hidden].

        Row t of the result is the sum of `weights[t, k] * x[places[t, k]]` over all k. `places` is int64 [rows,
        experts], and `weights` float32 [rows, experts].
        """
        rows, chosen = places.shape
        out = self.take(rows, x.shape[1])
        size = {"rows": rows, "chosen": chosen, "width": x.shape[1]}
        self.launch("sum_pairs", x=x, places=places, weights=weights, out=out, **size)
        return out

    def choose_rows(self, x: Tensor, rows: Tensor, out: Tensor | None = None) -> Tensor:
        """Return x's rows `rows` (see `Ops.choose_rows`)."""
        if x.dtype == tensors.bfloat16:
            chosen = self.choose_rows(x.view(tensors.float32), rows).view(tensors.bfloat16)
            return chosen if out is None else out.copy_(chosen)
        count, width = rows.shape[0], x.shape[1]
        out = self.take(count, width) if out is None else out
        self.launch("choose_rows", x=x, chosen=rows, out=out, rows=count, width=width)
        return out
