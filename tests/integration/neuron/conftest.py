"""Fixtures that tests of several folders share."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GGUF file with random weights, which engines load faster than a real model. It has the token ids of SmolLM2."""
    from neuron.ranks.rank_models import write_tiny_gguf

    return write_tiny_gguf(tmp_path_factory.mktemp("tiny"))
