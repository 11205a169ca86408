"""Tokenizer fixtures: real vocabularies from packages, and one tiny vocabulary."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoTokenizer

from helexa.neuron.text.tokenizer import Tokenizer
from helexa.neuron.weights.gguf.files import GgufFile
from local_tokenizers import from_gguf

OpenVocabulary = Callable[[str], Tokenizer]


@pytest.fixture(scope="session")
def vocabulary(llama_cpp_models: Path) -> OpenVocabulary:
    """Return `vocabulary(name)`, which returns the tokenizer in `ggml-vocab-{name}.gguf`."""

    @cache
    def open_vocabulary(name: str) -> Tokenizer:
        return from_gguf(GgufFile.open(llama_cpp_models / f"ggml-vocab-{name}.gguf").metadata)

    return open_vocabulary


@pytest.fixture(scope="session")
def smollm2(smollm2_gguf: Path) -> Tokenizer:
    return from_gguf(GgufFile.open(smollm2_gguf).metadata)


@pytest.fixture(scope="session")
def reference_smollm2(smollm2_gguf: Path, swift_transformers: None) -> Any:
    """Return the tokenizer that transformers reads from the SmolLM2 GGUF file."""
    return AutoTokenizer.from_pretrained(smollm2_gguf.parent, gguf_file=smollm2_gguf.name)


@pytest.fixture
def byte_metadata() -> dict[str, Any]:
    """Return GGUF metadata of a tiny vocabulary.

    The tokens are the 256 bytes, `he` (256), a control token (257), a user-defined token (258) and an end-of-turn token
    (259).
    """
    tokens = [*sorted(ByteLevel.alphabet()), "he", "<|control|>", "<mark é>", "<|im_end|>"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * 257 + [3, 4, 3],
        "tokenizer.ggml.merges": ["h e"],
        "tokenizer.ggml.bos_token_id": 257,
        "tokenizer.ggml.eos_token_id": 257,
    }
