"""Fixtures: one running stack and one client for all tests of this folder."""

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from clients.stack import Stack
from cortex.gateway_fixtures import node

__all__ = ["node"]


@pytest.fixture(scope="session")
def stack(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(smollm2_gguf, tmp_path_factory.mktemp("stack")) as stack:
        yield stack


@pytest.fixture(scope="session")
def client(stack: Stack) -> Iterator[openai.OpenAI]:
    with stack.client() as client:
        yield client
