"""Launches native kernels, and lends the memory for their results."""

import struct

import torch
from torch import Tensor

from helexa.neuron.ops.graph import Graphs
from helexa.neuron.ops.workspace import Workspace

GATES = {None: 0, "silu": 1, "gelu_tanh": 2}
"""Gates by name, with their numbers in lanes.h."""

_BLOCK_BYTES, _GROUP = 80, 32
_SPARE_BLOCKS = 8  # `multiply` reads beyond its rows


class Launcher:
    """What the native operators share.

    Attributes:
        x_bits: to which products with quantised weights round activations, 16 or 8.
    """

    def __init__(self, workspace: Workspace, graphs: Graphs, x_bits: int) -> None:
        self.x_bits = x_bits
        self._workspace = workspace
        self._graphs = graphs

    def take(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Memory for a result."""
        return self._workspace.take(*shape, dtype=dtype)

    def take_rounded(self, rows: int, columns: int) -> Tensor:
        """Memory for activations [rows, columns] that are rounded to `x_bits`."""
        blocks = rows * columns // _GROUP + _SPARE_BLOCKS
        return self._workspace.take(blocks * _BLOCK_BYTES, dtype=torch.uint8)

    def launch(self, kernel: str, *arguments: Tensor | int, waits: bool = True) -> None:
        """Run a kernel, or record it."""
        self._graphs.launch(kernel, waits, arguments)

    def gate_mul(self, gate_up: Tensor, gate: str) -> Tensor:
        """See `ReferenceOps.gate_mul`."""
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = self.take(rows, width)
        self.launch("gate_mul", gate_up, out, rows, width, GATES[gate])
        return out

    def choose_rows(self, x: Tensor, rows: Tensor) -> Tensor:
        """See `Ops.choose_rows`."""
        out = self.take(rows.shape[0], x.shape[1])
        self.launch("choose_rows", x, rows, out, *out.shape)
        return out


def float_bits(number: float) -> int:
    """A float32 as kernels take it among their integer arguments."""
    return struct.unpack("<i", struct.pack("<f", number))[0]
