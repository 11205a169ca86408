"""What the runner refuses: checkpoints whose tensors and configuration disagree, devices that do not work."""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from helexa.core.errors import ModelFileError
from helexa.neuron.engine.execution.runner import Runner
from helexa.neuron.engine.ipc.messages import EngineOptions
from helexa.neuron.engine.loading import load as load_module
from helexa.neuron.engine.loading.device import DeviceError, usable_device
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


def test_a_sound_checkpoint_loads(tmp_path: Path) -> None:
    assert load(write(tmp_path)).facts.vocab_size == 48


@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_a_cache_of_a_stated_size_is_resident_from_the_start(tmp_path: Path, dtype: str) -> None:
    load(write(tmp_path))  # what every first runner of a process takes
    before = own_bytes(os.getpid())
    runner = load_once(tmp_path, EngineOptions(device="cpu", dtype=dtype, kv_cache_mb=256))
    after = own_bytes(os.getpid())
    assert before is not None
    assert after is not None
    assert after - before > 0.95 * runner.facts.kv_bytes > 240 << 20


@pytest.mark.parametrize("name", SHAPES)
def test_a_tensor_of_another_shape_than_configured_is_refused(tmp_path: Path, name: str) -> None:
    """Native kernels would read and write beyond it."""
    smaller = (*SHAPES[name][:-1], 16)
    with pytest.raises(ModelFileError, match=r"has shape \[.*16\], but the configuration requires"):
        load(write(tmp_path, {name: smaller}))


@pytest.mark.parametrize("name", ["lm_head.weight", LAYER + "self_attn.q_proj.weight", LAYER + "mlp.up_proj.weight"])
def test_a_tensor_of_fewer_rows_than_configured_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ModelFileError, match=r"has shape \[16, 64\], but the configuration requires"):
        load(write(tmp_path, {name: (16, 64)}))


def test_a_bias_of_another_width_is_refused(tmp_path: Path) -> None:
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
def test_a_setting_that_makes_no_sense_is_the_fault_of_the_model_file(tmp_path: Path, key: str, value: object) -> None:
    with pytest.raises(ModelFileError):
        load(write(tmp_path, **{key: value}))


def test_a_device_that_does_not_work_is_named(tmp_path: Path) -> None:
    for device in ("cuda:99", "nonsense"):
        with pytest.raises(DeviceError, match=f"device '{device}' cannot be used"):
            load(write(tmp_path), device)


def test_a_device_without_a_number_is_the_one_that_tensors_go_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch makes no device the current one whose number it is not told."""
    current: list[int] = []
    monkeypatch.setattr(torch, "zeros", lambda size, device: SimpleNamespace(device=torch.device("cuda:1")))
    monkeypatch.setattr(torch._C, "_cuda_setDevice", current.append, raising=False)
    assert usable_device("cuda") == torch.device("cuda:1")
    assert current == [1]


def test_a_device_that_torch_has_no_kernels_for_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of a card which is older than all that this torch was built for."""

    def zeros(size: int, device: torch.device) -> torch.Tensor:
        raise torch.AcceleratorError("CUDA error: no kernel image is available for execution on the device\nCompile..")

    monkeypatch.setattr(torch, "zeros", zeros)
    with pytest.raises(DeviceError, match="device 'cuda:0' cannot be used: CUDA error: no kernel image is available"):
        usable_device("cuda:0")


def test_too_little_memory_is_not_blamed_on_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class NoRoom(Llama):
        def prepare(self) -> None:
            raise torch.OutOfMemoryError

    monkeypatch.setattr(load_module, "model_class", lambda model_type: NoRoom)
    with pytest.raises(torch.OutOfMemoryError):
        load(write(tmp_path))
