"""Every architecture against transformers in float32: random weights, written by transformers, logits compared."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from helexa.core.errors import ModelFileError
from helexa.neuron.engine.messages import EngineOptions, Generate, SamplingParams
from helexa.neuron.engine.pages import PagePool
from helexa.neuron.engine.runner import PAGE_SIZE, Runner
from helexa.neuron.engine.scheduler import Scheduler
from helexa.neuron.engine.sequence import Sequence

SHAPE = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama, biased and untied": {"model_type": "llama", "attention_bias": True, "tie_word_embeddings": False},
    "llama, wide heads": {"model_type": "llama", "head_dim": 32, "tie_word_embeddings": True},
    "llama 3.1 rope": {
        "model_type": "llama",
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "llama, linear rope": {
        "model_type": "llama",
        "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    },
    "qwen2": {"model_type": "qwen2"},
    "qwen2, tied": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "head_dim": 32, "tie_word_embeddings": True},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_those_of_transformers(variant: str, tmp_path: Path) -> None:
    settings = SHAPE | VARIANTS[variant]
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    torch.manual_seed(0)
    reference = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, parameter in reference.named_parameters():  # norms and biases start as constants, which would hide faults
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.3)
    reference.save_pretrained(tmp_path, max_shard_size="50kB")
    assert (tmp_path / "model.safetensors.index.json").exists()

    prompt = torch.randint(0, SHAPE["vocab_size"], (150,)).tolist()
    with torch.inference_mode():
        expected = reference(torch.tensor([prompt])).logits[0]

    runner = Runner(tmp_path, EngineOptions(dtype="float32", kv_cache_mb=8))
    for count in (1, 2, 64, 65, 150):
        logits = last_logits(runner, prompt[:count])
        torch.testing.assert_close(logits, expected[count - 1], rtol=1e-4, atol=1e-4)


def last_logits(runner: Runner, prompt: list[int]) -> torch.Tensor:
    """Logits after the last prompt token, computed in chunks of 48."""
    pool = PagePool(runner.facts.kv_pages, PAGE_SIZE)
    scheduler = Scheduler(EngineOptions(max_step_tokens=48), pool)
    request = Generate(id=0, prompt=prompt, max_tokens=1, sampling=SamplingParams(temperature=0))
    scheduler.add(Sequence(request))
    while True:
        plan = scheduler.plan()
        logits = runner.forward(plan)
        if len(logits):
            return logits[0]
        scheduler.commit(plan, [])


@pytest.mark.parametrize(
    "setting",
    [
        {"quantization_config": {"quant_method": "awq"}},
        {"hidden_act": "gelu"},
        {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
    ],
    ids=lambda setting: next(iter(setting)),
)
def test_what_would_load_but_compute_something_else_is_refused_by_name(setting: dict[str, Any], tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SHAPE)).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["rope_parameters"]
    (tmp_path / "config.json").write_text(json.dumps(config | setting))
    expected = "dynamic" if "rope_scaling" in setting else next(iter(setting))
    with pytest.raises(ModelFileError, match=expected):
        Runner(tmp_path, EngineOptions(dtype="float32", kv_cache_mb=8))
