"""Launch of native kernels, and allocation of memory for their results."""

import torch
from torch import Tensor

from helexa.neuron.ops.constants import BLOCK_BYTES, GELU_TANH, GROUP, SILU, SPARE_BLOCKS
from helexa.neuron.ops.native.captured_graph import Graphs
from helexa.neuron.ops.native.kernel_library import Argument
from helexa.neuron.ops.native.workspace import Workspace

GATES = {None: 0, "silu": SILU, "gelu_tanh": GELU_TANH}
"""Codes of the activations in kernels.h, by name."""


class Launcher:
    """Functions that the native operators share: kernel launches, and memory for results.

    Attributes:
        x_bits: bits to which products with quantized weights round activations, 16 or 8.
    """

    def __init__(self, workspace: Workspace, graphs: Graphs, x_bits: int) -> None:
        self.x_bits = x_bits
        self._workspace = workspace
        self._graphs = graphs

    def take(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return an uninitialized temporary tensor of `shape` for the result of a kernel."""
        return self._workspace.take(*shape, dtype=dtype)

    def take_rounded(self, rows: int, columns: int) -> Tensor:
        """Return uninitialized memory for activations [rows, columns] that a kernel rounds to `x_bits` bits."""
        blocks = rows * columns // GROUP + SPARE_BLOCKS
        return self._workspace.take(blocks * BLOCK_BYTES, dtype=torch.uint8)

    def launch(self, kernel: str, waits: bool = True, /, **arguments: Argument) -> None:
        """Run a kernel, or record the call if a graph is being captured (see `KernelLibrary.instruction`)."""
        self._graphs.launch(kernel, waits, arguments)

    def gate_mul(self, gate_up: Tensor, gate: str) -> Tensor:
        """Return `gate(first half) * second half` of `gate_up` [T, 2 * I], with the activation `gate` of `GATES`."""
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = self.take(rows, width)
        self.launch("gate_mul", x=gate_up, out=out, rows=rows, width=width, gate=GATES[gate])
        return out

    def choose_rows(self, x: Tensor, rows: Tensor) -> Tensor:
        """Return the rows of x [T, H] with the indexes `rows` [S], as [S, H]."""
        count, width = rows.shape[0], x.shape[1]
        out = self.take(count, width)
        self.launch("choose_rows", x=x, chosen=rows, out=out, rows=count, width=width)
        return out
