"""Qwen2 compared with transformers on a GGUF file with the types that Q4_K_M mixes.

Weights are random; `test_logits.py` compares the same architecture from safetensors.
"""

import math
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType
from scheduler_runs import GREEDY, scheduler_of
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config

from helexa.neuron.engine.execution.runner import Runner
from helexa.neuron.engine.execution.step_builder_and_penalties import build_step
from helexa.neuron.engine.ipc.engine_options import EngineOptions
from helexa.neuron.engine.ipc.messages import Generate
from helexa.neuron.engine.loading.load import load_once
from helexa.neuron.engine.scheduling.sequence import Sequence

SHAPE = {
    "vocab_size": 320,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
    "tie_word_embeddings": False,
}
TYPES = {
    "embed_tokens": "Q5_0",
    "lm_head": "Q8_0",
    "q_proj": "Q4_K",
    "k_proj": "Q4_K",
    "v_proj": "Q6_K",
    "o_proj": "Q4_0",
    "gate_proj": "Q5_K",
    "up_proj": "Q5_1",
    "down_proj": "Q6_K",
}
# gguf cannot write K types. Fields that are float16 in each block, so that random codes make small weights.
UNITS = {"Q4_K": {0: 1e-4, 2: 7.5e-4}, "Q5_K": {0: 5e-5, 2: 7.5e-4}, "Q6_K": {208: 2e-5}}


def write_gguf(path: Path, model: PreTrainedModel, config: Qwen2Config) -> Path:
    """Write `model` as a GGUF file; then set its weights to the values that gguf reads from the file."""
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, config.num_hidden_layers)
    for name, weight in model.state_dict().items():
        stored = weight.numpy()
        kind = TYPES.get(name.split(".")[-2], "F32") if weight.dim() == 2 else "F32"
        quantized = GGMLQuantizationType[kind]
        if kind in UNITS:
            stored = random_blocks(kind, weight.shape)
        elif kind != "F32":
            stored = gguf.quants.quantize(stored, quantized)
        writer.add_tensor(names.get_name(name, (".weight", ".bias")), stored, raw_dtype=quantized)
        weight.copy_(torch.from_numpy(gguf.quants.dequantize(stored, quantized)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def random_blocks(kind: str, shape: torch.Size) -> np.ndarray:
    weights, size = gguf.GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    count = math.prod(shape) // weights
    stored = np.random.default_rng(count).integers(0, 256, (count, size), dtype=np.uint8)
    for at, unit in UNITS[kind].items():
        stored[:, at : at + 2] = np.array([unit], np.float16).view(np.uint8)
    return stored.reshape(shape[0], -1)


def test_logits_of_a_gguf_file_match_transformers(tmp_path: Path) -> None:
    config = Qwen2Config(**SHAPE)
    torch.manual_seed(0)
    reference = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, parameter in reference.named_parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.3)
    with torch.inference_mode():
        path = write_gguf(tmp_path / "model.gguf", reference, config)
        prompt = torch.randint(0, config.vocab_size, (150,)).tolist()
        expected = reference(torch.tensor([prompt])).logits[0]

    runner = load_once(path, EngineOptions(dtype="float32", kv_cache_mb=8))
    assert runner.facts.model_type == "qwen2"
    for count in (1, 2, 65, 150):
        torch.testing.assert_close(last_logits(runner, prompt[:count]), expected[count - 1], rtol=1e-4, atol=1e-4)


def last_logits(runner: Runner, prompt: list[int]) -> torch.Tensor:
    """Return the logits after the last prompt token."""
    scheduler = scheduler_of(runner)
    assert scheduler.add(Sequence(Generate(id=0, prompt=prompt, max_tokens=1, sampling=GREEDY))) is None
    return runner.logits_of(build_step(scheduler.plan()))[0]
