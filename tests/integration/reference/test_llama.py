"""Llama compared with transformers on SmolLM2's real weights, dequantized by transformers."""

import shutil
from pathlib import Path

import pytest
import torch
from scheduler_runs import generate, scheduler_of
from transformers import AutoModelForCausalLM

from helexa.neuron.engine.ipc.engine_options import EngineOptions
from helexa.neuron.engine.loading.load import load_once
from helexa.neuron.ops.native import kernel_library
from helexa.neuron.ops.native.native_ops import NativeOps
from helexa.neuron.ops.torch_cpu_ops import CpuOps
from helexa.neuron.weights.gguf.files import GgufFile
from local_tokenizers import from_gguf

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea, there lived an old fisherman who",
    "def fibonacci(n: int) -> int:\n    ",
]


@pytest.fixture(scope="module")
def prompts(smollm2_gguf: Path) -> list[list[int]]:
    tokenizer = from_gguf(GgufFile.open(smollm2_gguf).metadata)
    return [tokenizer.encode(prompt) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def completions(smollm2_gguf: Path, prompts: list[list[int]]) -> list[list[int]]:
    """The first 48 greedy tokens of each prompt, computed with the reference operations. A page has 64 positions."""
    runner = load_once(smollm2_gguf, EngineOptions(dtype="float32", kv_cache_mb=64))
    return generate(runner, scheduler_of(runner), prompts, 48)


@pytest.mark.usefixtures("swift_transformers")
def test_greedy_tokens_of_smollm2_match_transformers(
    smollm2_gguf: Path, prompts: list[list[int]], completions: list[list[int]]
) -> None:
    reference = AutoModelForCausalLM.from_pretrained(
        smollm2_gguf.parent, gguf_file=smollm2_gguf.name, dtype=torch.float32
    )
    for prompt, tokens in zip(prompts, completions, strict=True):
        with torch.inference_mode():  # if each token is right given the previous ones, all are right
            logits = reference(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        assert tokens == logits.argmax(-1).tolist()


@pytest.mark.skipif(
    not CpuOps.available(), reason="this CPU does not multiply bfloat16, so the packed path is not used"
)
@pytest.mark.parametrize("compiler", [True, False])
def test_native_and_fallback_kernels_give_the_same_first_sixteen_tokens_as_float32(
    smollm2_gguf: Path,
    prompts: list[list[int]],
    completions: list[list[int]],
    compiler: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not compiler:
        monkeypatch.setenv("PATH", "/nonexistent")
        monkeypatch.setattr(kernel_library, "native_kernels", kernel_library.native_kernels.__wrapped__)
    runner = load_once(smollm2_gguf, EngineOptions(kv_cache_mb=64))
    assert runner.ops.name == (NativeOps.name if compiler and shutil.which("cc") else CpuOps.name)
    separately = [generate(runner, scheduler_of(runner), [prompt], 16)[0] for prompt in prompts]
    assert separately == [tokens[:16] for tokens in completions]
