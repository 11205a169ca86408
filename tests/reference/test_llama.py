"""Our llama against transformers on SmolLM2's real weights, dequantised there by transformers itself."""

import shutil
from pathlib import Path

import pytest
import torch
from driving import generate, scheduler_of
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from helexa.neuron.engine.messages import EngineOptions
from helexa.neuron.engine.runner import Runner
from helexa.neuron.ops import compiler as compiler_module
from helexa.neuron.ops.cpu import CpuOps
from helexa.neuron.ops.native import NativeOps

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea, there lived an old fisherman who",
    "def fibonacci(n: int) -> int:\n    ",
]


@pytest.fixture(scope="module")
def tokenizer(smollm2_gguf: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(smollm2_gguf.parent, gguf_file=smollm2_gguf.name)


@pytest.fixture(scope="module")
def prompts(tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    return [tokenizer(prompt).input_ids for prompt in PROMPTS]


@pytest.fixture(scope="module")
def reference(smollm2_gguf: Path, prompts: list[list[int]]) -> list[list[int]]:
    """64 greedy tokens of transformers for each prompt."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        smollm2_gguf.parent, gguf_file=smollm2_gguf.name, dtype=torch.float32
    )
    model.generation_config.eos_token_id = None  # run on past the end, as the engine does without stop ids
    outputs = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=64, do_sample=False)
        outputs.append(out[0, len(prompt) :].tolist())
    return outputs


def test_greedy_tokens_equal_those_of_transformers(
    smollm2_gguf: Path, prompts: list[list[int]], reference: list[list[int]]
) -> None:
    runner = Runner(smollm2_gguf, EngineOptions(dtype="float32", kv_cache_mb=64))
    assert generate(runner, scheduler_of(runner), prompts, 64) == reference


@pytest.mark.skipif(
    not CpuOps.available(), reason="this CPU does not multiply bfloat16, so the packed path is not used"
)
@pytest.mark.parametrize("compiler", [True, False])
def test_packed_kernels_agree_for_the_first_sixteen_tokens(
    smollm2_gguf: Path,
    prompts: list[list[int]],
    reference: list[list[int]],
    compiler: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not compiler:
        monkeypatch.setenv("PATH", "/nonexistent")
        monkeypatch.setattr(compiler_module, "native_kernels", compiler_module.native_kernels.__wrapped__)
    runner = Runner(smollm2_gguf, EngineOptions(kv_cache_mb=64))
    assert runner.ops.name == (NativeOps.name if compiler and shutil.which("cc") else CpuOps.name)
    alone = [generate(runner, scheduler_of(runner), [prompt], 16)[0] for prompt in prompts]
    assert alone == [tokens[:16] for tokens in reference]
