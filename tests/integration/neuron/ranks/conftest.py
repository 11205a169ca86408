"""Fixtures of the tests of tensor parallelism."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from neuron.ranks.rank_models import write_tiny_gguf


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Limit torch to one thread: with tiny models, more threads mostly wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("tiny"))
