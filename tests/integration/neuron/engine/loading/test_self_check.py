"""The self-check after loading: a model that overflows is loaded again in float32, and a broken model is rejected."""

import logging
import re
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from helexa.core.errors import HelexaError, ModelFileError
from helexa.neuron.engine.execution.runner import Runner
from helexa.neuron.engine.ipc.engine_options import EngineOptions
from helexa.neuron.engine.loading.load import NotFiniteError, load, load_once
from helexa.neuron.engine_client.client import EngineClient
from tiny_models import decode, tiny_model
from without_torch import without_torch

LAYER = "model.layers.1."
SHAPE = {
    "model_type": "qwen3",
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 128,
}

Tensors = dict[str, torch.Tensor]


def too_large_for_float16(tensors: Tensors) -> None:
    tensors[f"{LAYER}mlp.down_proj.weight"] *= 1e6


def too_large_for_bfloat16(tensors: Tensors) -> None:
    """Use the largest float32, which overflows in bfloat16; a small norm weight compensates for it."""
    tensors[f"{LAYER}mlp.up_proj.weight"][:, 0] = torch.finfo(torch.float32).max
    tensors[f"{LAYER}post_attention_layernorm.weight"][0] = 1e-38


def broken(tensors: Tensors) -> None:
    tensors[f"{LAYER}mlp.down_proj.weight"][3, 5] = float("nan")


def checkpoint(folder: Path, change: Callable[[Tensors], None]) -> Path:
    tiny_model(folder, **SHAPE)
    tensors = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


def options(dtype: str, quant: str = "") -> EngineOptions:
    return EngineOptions(dtype=dtype, kv_cache_mb=1, quant=quant)


CASES = [("float16", too_large_for_float16), ("bfloat16", too_large_for_bfloat16)]


@pytest.mark.parametrize(("dtype", "change"), CASES)
def test_model_that_overflows_in_16_bits_is_loaded_again_in_float32(
    dtype: str, change: Callable[[Tensors], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = checkpoint(tmp_path, change)
    with pytest.raises(NotFiniteError, match=f"not finite numbers in {dtype}"):
        load_once(folder, options(dtype))
    with caplog.at_level(logging.WARNING):
        runner = load(folder, options(dtype))
    assert runner.ops.dtype == torch.float32
    assert re.search(f"model is loaded again in float32 error='.*not finite numbers in {dtype}'", caplog.text)
    ((_, logits),) = decode(runner, [[5, 6, 7]], steps=3)
    assert logits.isfinite().all()


def test_memory_of_the_16_bit_load_is_freed_before_the_load_in_float32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU does not have memory for both attempts, and torch caches freed memory."""
    tried: list[weakref.ref[Runner]] = []
    alive: list[int] = []
    check = Runner.computes_finite_logits

    def checked(runner: Runner, *arguments: Any) -> bool:
        tried.append(weakref.ref(runner))
        return check(runner, *arguments)

    monkeypatch.setattr(Runner, "computes_finite_logits", checked)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: alive.append(sum(ref() is not None for ref in tried)))
    load(checkpoint(tmp_path, too_large_for_float16), options("float16"))
    assert (len(tried), alive) == (2, [0])


@pytest.mark.parametrize(("dtype", "change"), [CASES[0], ("auto", too_large_for_bfloat16)])
async def test_after_a_reload_in_float32_the_engine_reports_dtype_float32(
    dtype: str, change: Callable[[Tensors], None], tmp_path: Path
) -> None:
    client = await EngineClient.start(checkpoint(tmp_path, change), options(dtype))
    await client.close()
    assert client.ready.dtype == "float32"


async def test_model_that_overflows_is_rejected_if_torch_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoint(tmp_path / "model", too_large_for_bfloat16)
    for name, value in without_torch(tmp_path).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(HelexaError, match=r"only torch can use float32, and torch is not installed; .*helexa\[gpu\]"):
        await EngineClient.start(folder, options("auto"))


@pytest.mark.parametrize("quant", ["", "q8_0"])
@pytest.mark.parametrize("dtype", ["auto", "float16", "float32"])
def test_model_with_nan_weights_is_rejected(dtype: str, quant: str, tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="the logits of the model are not finite numbers in float32"):
        load(checkpoint(tmp_path, broken), options(dtype, quant))


def test_model_with_finite_logits_is_loaded_once_in_the_requested_dtype(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = checkpoint(tmp_path, lambda tensors: None)
    progress: list[int] = []
    with caplog.at_level(logging.WARNING):
        runner = load(folder, options("float16"), lambda done, total: progress.append(done))
    assert runner.ops.dtype == torch.float16
    assert progress == sorted(progress)
    assert not caplog.records


def test_self_check_at_load_does_not_change_later_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache entries that the self-check writes are not used by later sequences."""
    folder = checkpoint(tmp_path, lambda tensors: None)
    checked = decode(load_once(folder, options("float32")), [[1, 2, 3], [4]], steps=5)
    monkeypatch.setattr(Runner, "computes_finite_logits", lambda *arguments: True)
    unchecked = decode(load_once(folder, options("float32")), [[1, 2, 3], [4]], steps=5)
    for (tokens, logits), (expected_tokens, expected) in zip(checked, unchecked, strict=True):
        assert tokens == expected_tokens
        assert torch.equal(logits, expected)
