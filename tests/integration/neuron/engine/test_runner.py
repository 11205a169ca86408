"""Errors of loading: tensors that contradict the configuration, invalid settings, and unusable devices."""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from helexa.core.errors import ModelFileError
from helexa.neuron.engine.execution.device_errors import DeviceError
from helexa.neuron.engine.execution.runner import Runner
from helexa.neuron.engine.ipc.engine_options import EngineOptions
from helexa.neuron.engine.loading import build as build_module
from helexa.neuron.engine.loading.backend_kernels_and_kv_dtype import usable_device
from helexa.neuron.engine.loading.load import load_once
from helexa.neuron.hardware.host_memory import own_bytes
from helexa.neuron.models.llama import Llama

CONFIG = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 64,
}
LAYER = "model.layers.0."
SHAPES = {
    "model.embed_tokens.weight": (48, 64),
    "lm_head.weight": (48, 64),
    "model.norm.weight": (64,),
    LAYER + "input_layernorm.weight": (64,),
    LAYER + "post_attention_layernorm.weight": (64,),
    LAYER + "self_attn.q_proj.weight": (64, 64),
    LAYER + "self_attn.k_proj.weight": (32, 64),
    LAYER + "self_attn.v_proj.weight": (32, 64),
    LAYER + "self_attn.o_proj.weight": (64, 64),
    LAYER + "self_attn.q_norm.weight": (32,),
    LAYER + "self_attn.k_norm.weight": (32,),
    LAYER + "mlp.gate_proj.weight": (128, 64),
    LAYER + "mlp.up_proj.weight": (128, 64),
    LAYER + "mlp.down_proj.weight": (64, 128),
}


def write(folder: Path, shapes: dict[str, tuple[int, ...]] | None = None, **config: object) -> Path:
    save_file({name: torch.ones(shape) for name, shape in (SHAPES | (shapes or {})).items()}, folder / "x.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    return folder


def load(folder: Path, device: str = "cpu") -> Runner:
    return load_once(folder, EngineOptions(device=device, kv_cache_mb=1))


def test_generated_test_checkpoint_loads_without_an_error(tmp_path: Path) -> None:
    assert load(write(tmp_path)).facts.vocab_size == 48


@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_memory_of_the_configured_kv_cache_is_resident_after_loading(tmp_path: Path, dtype: str) -> None:
    load(write(tmp_path))  # allocates what the first runner of a process allocates once
    initial = own_bytes(os.getpid())
    runner = load_once(tmp_path, EngineOptions(device="cpu", dtype=dtype, kv_cache_mb=256))
    final = own_bytes(os.getpid())
    assert initial is not None
    assert final is not None
    assert final - initial > 0.95 * runner.facts.kv_bytes > 240 << 20


@pytest.mark.parametrize("name", SHAPES)
def test_weight_tensor_of_wrong_shape_raises_model_file_error(tmp_path: Path, name: str) -> None:
    """Without the check, native kernels would access memory outside the tensor."""
    smaller = (*SHAPES[name][:-1], 16)
    with pytest.raises(ModelFileError, match=r"has shape \[.*16\], but the configuration requires"):
        load(write(tmp_path, {name: smaller}))


@pytest.mark.parametrize("name", ["lm_head.weight", LAYER + "self_attn.q_proj.weight", LAYER + "mlp.up_proj.weight"])
def test_weight_tensor_with_too_few_rows_raises_model_file_error(tmp_path: Path, name: str) -> None:
    with pytest.raises(ModelFileError, match=r"has shape \[16, 64\], but the configuration requires"):
        load(write(tmp_path, {name: (16, 64)}))


def test_bias_tensor_of_wrong_width_raises_model_file_error(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"q_proj.bias has shape \[1\], but the configuration requires \[64\]"):
        load(write(tmp_path, {LAYER + "self_attn.q_proj.bias": (1,)}))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rms_norm_eps", -1),
        ("rms_norm_eps", float("nan")),
        ("rope_theta", -10000),
        ("rope_scaling", {"rope_type": "linear", "factor": 0}),
        ("rope_scaling", [1]),
        ("rope_parameters", "linear"),
        ("max_position_embeddings", -5),
        ("max_position_embeddings", float("inf")),
        ("intermediate_size", None),
        ("num_attention_heads", "two"),
        ("num_key_value_heads", [1]),
        ("hidden_size", "64"),
    ],
)
def test_invalid_setting_in_config_json_raises_model_file_error(tmp_path: Path, key: str, value: object) -> None:
    with pytest.raises(ModelFileError):
        load(write(tmp_path, **{key: value}))


def test_unusable_device_is_named_in_the_error(tmp_path: Path) -> None:
    for device in ("cuda:99", "nonsense"):
        with pytest.raises(DeviceError, match=f"device '{device}' cannot be used"):
            load(write(tmp_path), device)


def test_device_cuda_without_an_index_becomes_the_current_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch does not set a device without an index as the current device."""
    current: list[int] = []
    monkeypatch.setattr(torch, "zeros", lambda size, device: SimpleNamespace(device=torch.device("cuda:1")))
    monkeypatch.setattr(torch._C, "_cuda_setDevice", current.append, raising=False)
    assert usable_device("cuda") == torch.device("cuda:1")
    assert current == [1]


def test_device_without_torch_kernels_is_named_in_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """For example a GPU that is older than all GPUs that this torch build supports."""

    def zeros(size: int, device: torch.device) -> torch.Tensor:
        raise torch.AcceleratorError("CUDA error: no kernel image is available for execution on the device\nCompile..")

    monkeypatch.setattr(torch, "zeros", zeros)
    with pytest.raises(DeviceError, match="device 'cuda:0' cannot be used: CUDA error: no kernel image is available"):
        usable_device("cuda:0")


def test_out_of_memory_while_loading_is_not_reported_as_a_model_file_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class OutOfMemoryModel(Llama):
        def prepare(self) -> None:
            raise torch.OutOfMemoryError

    monkeypatch.setattr(build_module, "model_class", lambda model_type: OutOfMemoryModel)
    with pytest.raises(torch.OutOfMemoryError):
        load(write(tmp_path))
