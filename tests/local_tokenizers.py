"""Tokenizers that call the library `tokenizers` in the process of the test."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from helexa.neuron.text.encoder import BackendEncoder
from helexa.neuron.text.tokenizer import Tokenizer
from helexa.neuron.text.tokenizer_files import backend_vocabulary, directory_tokenizer, gguf_tokenizer


def of_backend(backend: tokenizers.Tokenizer, **stated: Any) -> Tokenizer:
    """Return a tokenizer with the vocabulary of `backend`. For `stated`, see `backend_vocabulary`."""
    return Tokenizer(backend_vocabulary(backend, **stated), BackendEncoder(backend))


def from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    return Tokenizer(*gguf_tokenizer(metadata))


def from_directory(path: Path) -> Tokenizer:
    return Tokenizer(*directory_tokenizer(path))
