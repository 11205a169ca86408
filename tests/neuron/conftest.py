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
