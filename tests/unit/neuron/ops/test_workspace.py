"""Memory of a step: a freed tensor's memory is reused, a referenced tensor's is not."""

import gc
from contextlib import nullcontext
from itertools import pairwise

import pytest
import torch

from helexa.neuron import tensors
from helexa.neuron.ops.native.captured_graph import Workspace
from numpy_tensors import numpy_tensors


def test_memory_of_a_freed_workspace_tensor_is_reused() -> None:
    workspace = Workspace()
    first = workspace.take(7, 5)
    address = first.data_ptr()
    del first
    assert workspace.take(35).data_ptr() == address


def test_memory_of_a_workspace_tensor_with_a_live_view_is_not_reused() -> None:
    workspace = Workspace()
    first = workspace.take(64, 64).fill_(1.0)
    view = first[3:5].view(-1)[7:].split(10)[0]
    address = first.data_ptr()
    del first
    gc.collect()
    tensors = [workspace.take(64, 64).fill_(2.0) for _ in range(4)]
    assert address not in [tensor.data_ptr() for tensor in tensors]
    assert (view == 1.0).all()
    del view
    assert workspace.take(64, 64).data_ptr() == address


def test_workspace_tensors_are_disjoint_and_aligned() -> None:
    workspace = Workspace()
    shapes = [(1,), (0,), (3, 0), (17,), (1000, 3), (64,), (600, 600), (2,), (300_000,), (16,)]
    tensors = [workspace.take(*shape, dtype=dtype) for shape in shapes for dtype in (torch.float32, torch.uint8)]
    assert [tuple(tensor.shape) for tensor in tensors[::2]] == shapes
    ranges = sorted(
        (tensor.data_ptr(), tensor.data_ptr() + max(tensor.nbytes, 1)) for tensor in tensors if tensor.numel()
    )
    assert all(end <= start for (_, end), (start, _) in pairwise(ranges))
    assert all(start % 64 == 0 for start, _ in ranges)


def test_equal_steps_use_the_same_workspace_memory() -> None:
    workspace = Workspace()

    def step() -> set[int]:
        hidden = workspace.take(8, 576)
        delta = workspace.take(8, 576)
        wide = [workspace.take(8, 1536) for _ in range(2)]
        return {tensor.data_ptr() for tensor in (hidden, delta, *wide)}

    assert len({frozenset(step()) for _ in range(5)}) == 1


@pytest.mark.parametrize("backend", ["numpy", "torch"])
def test_workspace_recognizes_its_own_tensors_and_their_views(backend: str) -> None:
    with numpy_tensors() if backend == "numpy" else nullcontext():
        workspace = Workspace()
        assert workspace.holds(workspace.take(4, 6)[1:].view(-1))
        assert not workspace.holds(tensors.zeros(4, 6))
        assert not Workspace().holds(workspace.take(4, 6))
