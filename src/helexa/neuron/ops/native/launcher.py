"""Launch native kernels and allocate memory for their results."""

import torch
from torch import Tensor

from helexa.neuron.ops.constants import BLOCK_BYTES, GELU_TANH, GROUP, SILU, SPARE_BLOCKS
from helexa.neuron.ops.native.captured_graph import Graphs
from helexa.neuron.ops.native.kernel_library import Argument
from helexa.neuron.ops.native.workspace import Workspace

GATES = {None: 0, "silu": SILU, "gelu_tanh": GELU_TANH}
"""Gate codes of kernels.h by name."""


class Launcher:
    """Launch and memory functions shared by the native operators.

    Attributes:
        x_bits: bits to which products with quantized weights round activations, 16 or 8.
    """

    def __init__(self, workspace: Workspace, graphs: Graphs, x_bits: int) -> None:
        self.x_bits = x_bits
        self._workspace = workspace
        self._graphs = graphs

    def take(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return uninitialized memory for a result."""
        return self._workspace.take(*shape, dtype=dtype)

    def take_rounded(self, rows: int, columns: int) -> Tensor:
        """Return memory for activations [rows, columns] rounded to `x_bits`."""
        blocks = rows * columns // GROUP + SPARE_BLOCKS
        return self._workspace.take(blocks * BLOCK_BYTES, dtype=torch.uint8)

    def launch(self, kernel: str, waits: bool = True, /, **arguments: Argument) -> None:
        """Run a kernel, or record the call during a capture (see `KernelLibrary.instruction`)."""
        self._graphs.launch(kernel, waits, arguments)

    def gate_mul(self, gate_up: Tensor, gate: str) -> Tensor:
        """Return `gate(first) * second` for the halves of [T, 2 * I]; `gate` is a name in `GATES`."""
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = self.take(rows, width)
        self.launch("gate_mul", x=gate_up, out=out, rows=rows, width=width, gate=GATES[gate])
        return out

    def choose_rows(self, x: Tensor, rows: Tensor) -> Tensor:
        """Return rows [S] of x [T, H]."""
        count, width = rows.shape[0], x.shape[1]
        out = self.take(count, width)
        self.launch("choose_rows", x=x, chosen=rows, out=out, rows=count, width=width)
        return out
