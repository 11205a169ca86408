"""Each rank reads its own part of every tensor, from all formats of checkpoints."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from helexa.core.errors import ModelFileError
from helexa.neuron.engine.ipc.engine_options import EngineOptions
from helexa.neuron.engine.ipc.messages import MemoryGrant, MemoryRequest
from helexa.neuron.engine.loading.load import load_once
from helexa.neuron.engine.loading.memory_division import divide_free_memory
from helexa.neuron.engine.ranks.rank_processes import RankError, RankProcesses
from helexa.neuron.layers.loader import Loader
from helexa.neuron.models import model_class
from helexa.neuron.ops.rank_group_and_shares import RankGroup
from helexa.neuron.ops.reference.reference_ops import ReferenceOps
from helexa.neuron.weights.checkpoint import open_checkpoint
from neuron.ranks.rank_models import MODELS, STEPS, logits_and_tokens
from neuron.weights.hf_to_gguf import write_model
from nightly import daily
from tiny_models import tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

WIDE = {"hidden_size": 256, "intermediate_size": 768, "num_attention_heads": 8, "head_dim": 32, "vocab_size": 4096}
EXPERTS = {"moe_intermediate_size": 192, "shared_expert_intermediate_size": 192}
HEADS = {"num_key_value_heads": 4, "linear_num_key_heads": 4, "linear_num_value_heads": 8}


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "qwen3_5_moe", "qwen3_next"])
def test_each_rank_reads_only_its_part_of_the_file(name: str, tmp_path: Path) -> None:
    """Norms, routers and KV heads that ranks share are read by each rank: at most 5 % more than the file has."""
    tiny_model(tmp_path, **MODELS[name] | WIDE | EXPERTS | HEADS)
    bytes_of_ranks: list[int] = []
    for rank in range(2):
        ops = ReferenceOps(torch.device("cpu"), torch.float32)
        ops.ranks = RankGroup(rank, 2)
        reads = [0]
        with open_checkpoint(tmp_path) as checkpoint:
            architecture = model_class(checkpoint.config["model_type"])
            config = {**architecture.defaults, **checkpoint.config}
            architecture(config, Loader(checkpoint, ops, reads.append))
            total = checkpoint.total_bytes
        bytes_of_ranks.append(reads[-1])
    assert max(bytes_of_ranks) < 0.53 * total
    assert total <= sum(bytes_of_ranks) <= 1.05 * total


@pytest.mark.parametrize(
    "name", daily(MODELS.keys() - {"gemma3"}, ["llama", "gemma3", "gpt_oss", "qwen3_5_moe", "qwen3_next"])
)
def test_ranks_that_load_gguf_files_give_the_logits_of_one_rank(name: str, tmp_path: Path) -> None:
    reference = tiny_model(tmp_path, seed=3, **MODELS[name])
    path = write_model(tmp_path / "model.gguf", reference.config, reference.state_dict())
    expected, expected_tokens = logits_and_tokens(path)
    logits, tokens = logits_and_tokens(path, tensor_parallel=2)
    assert tokens == expected_tokens
    assert torch.equal(logits, expected)


@pytest.mark.parametrize("name", ["llama", "qwen3_5_moe"])
def test_quantization_at_load_on_two_ranks_gives_the_logits_of_one_rank(name: str, tmp_path: Path) -> None:
    tiny_model(tmp_path, seed=3, **MODELS[name] | WIDE | EXPERTS | HEADS)
    expected, expected_tokens = logits_and_tokens(tmp_path, quant="q4k")
    logits, tokens = logits_and_tokens(tmp_path, quant="q4k", tensor_parallel=2)
    assert tokens == expected_tokens
    assert torch.equal(logits, expected)


@pytest.mark.parametrize("name", ["llama", "qwen3_5_moe"])
def test_logits_of_quantized_weights_with_partial_sums_are_close_to_those_of_one_rank(
    name: str, tmp_path: Path
) -> None:
    """The attention outputs have a single q4k block, so they are computed exactly; other layers add partial sums."""
    tiny_model(tmp_path, seed=3, **MODELS[name] | WIDE | EXPERTS | HEADS)
    precise: dict[str, str] = {
        "quant": "q4k",
        "activations": "int16",
    }  # whether a number is an outlier depends on the rank's part
    expected, _ = logits_and_tokens(tmp_path, **precise)
    logits, _ = logits_and_tokens(tmp_path, **precise, tensor_parallel=2, tensor_parallel_mode="sum")
    torch.testing.assert_close(logits[::STEPS], expected[::STEPS], rtol=0, atol=0.02 * float(expected.std()))


def test_two_ranks_with_square_quantized_experts_give_the_logits_of_one_rank(tmp_path: Path) -> None:
    """The experts of gpt-oss-20b are square, so that their shape does not tell whether they are transposed."""
    tiny_model(tmp_path, seed=3, **MODELS["gpt_oss"] | {"hidden_size": 96, "intermediate_size": 96})
    quantize_experts(tmp_path)
    expected, expected_tokens = logits_and_tokens(tmp_path)
    logits, tokens = logits_and_tokens(tmp_path, tensor_parallel=2)
    assert tokens == expected_tokens
    assert torch.equal(logits, expected)


def test_load_fails_if_a_rank_cannot_read_the_model(tmp_path: Path) -> None:
    """Rank 0 has read the configuration before it requests memory, and the other ranks start after the grant."""
    tiny_model(tmp_path, **MODELS["llama"])

    def remove_configuration(request: MemoryRequest) -> MemoryGrant:
        (tmp_path / "config.json").unlink()
        return divide_free_memory(request)

    options = EngineOptions(kv_cache_mb=8, threads=1, tensor_parallel=2)
    with pytest.raises(ModelFileError, match=r"^rank 1: config\.json: .*No such file or directory") as failed:
        load_once(tmp_path, options, ask=remove_configuration)
    assert "\n" not in str(failed.value)


def test_load_fails_if_a_rank_is_killed(tmp_path: Path) -> None:
    endings: list[str] = []
    others = RankProcesses(2, endings.append)
    try:
        others._processes[0].kill()
        with pytest.raises(RankError, match=r"^the process of rank 1 was ended by SIGKILL \(out of memory\?\)$"):
            others.wait_until_loaded()
    finally:
        others.close()
    assert endings in ([], ["the process of rank 1 was ended by SIGKILL (out of memory?)"])


def test_message_to_a_killed_rank_raises_an_error_with_the_cause() -> None:
    others = RankProcesses(2, lambda _: None)
    try:
        others._processes[0].kill()
        others._processes[0].wait()
        with pytest.raises(RankError, match=r"^the process of rank 1 was ended by SIGKILL \(out of memory\?\)$"):
            others.connect(ReferenceOps(torch.device("cpu"), torch.float32), 1.0)
    finally:
        others.close()


def quantize_experts(folder: Path) -> None:
    """Replace the experts' matrices of a gpt-oss checkpoint by random MXFP4 matrices."""
    tensors = {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}
    generator = torch.Generator().manual_seed(5)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        shape = (experts, outputs, inputs // 32)
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
        tensors[f"{name}_scales"] = torch.randint(121, 124, shape, dtype=torch.uint8, generator=generator)
    for path in [*folder.glob("*.safetensors"), *folder.glob("*.index.json")]:
        path.unlink()
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))
