"""The configuration of the vision part of models, from folders and from `mmproj` files."""

import json
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from helexa.core.errors import ModelFileError
from helexa.neuron.vision.processor_choice import image_processor
from helexa.neuron.weights.gguf.mmproj import mmproj_beside
from helexa.neuron.weights.vision_checkpoint import open_vision_checkpoint
from helexa.neuron.weights.vision_config import has_vision, read_vision_config

QWEN: dict[str, Any] = {"model_type": "qwen3_5", "vision_config": {"hidden_size": 64}}


def folder_with(folder: Path, config: dict[str, Any], **files: dict[str, Any]) -> Path:
    names = ["model.visual.norm.weight", "visual.blocks.0.norm1.weight", "model.language_model.norm.weight"]
    save_file({name: torch.full((2,), float(n)) for n, name in enumerate(names)}, folder / "model.safetensors")
    for name, content in {"config": config, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def test_overlong_header_of_an_mmproj_file_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "mmproj.gguf"
    with path.open("wb") as file:
        file.write(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"k")
        file.write(struct.pack("<IQ", 8, 9 << 20))  # a string of 9 MiB
        file.truncate(1 << 30)
    with pytest.raises(ModelFileError, match="the header is larger than 8 MiB"):
        read_vision_config(tmp_path / "model.gguf")


def test_missing_vision_settings_have_the_defaults_of_transformers(tmp_path: Path) -> None:
    settings = read_vision_config(folder_with(tmp_path, QWEN))
    assert settings is not None
    vision = settings.config["vision_config"]
    assert (vision["hidden_size"], vision["depth"], vision["patch_size"]) == (64, 27, 16)
    assert settings.preprocessor == {}
    processor = image_processor(*settings)
    assert (processor.patch_size, processor.mean) == (16, (0.5, 0.5, 0.5))


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "qwen3"},
        {"model_type": "other", "vision_config": {}},
        {**QWEN, "vision_config": None},
        {"model_type": "llava", "vision_config": {"model_type": "clip_vision_model"}},
    ],
)
def test_model_without_a_supported_vision_part_has_no_vision_config(config: dict[str, Any], tmp_path: Path) -> None:
    folder = folder_with(tmp_path, config)
    assert read_vision_config(folder) is None
    assert open_vision_checkpoint(folder) is None


def test_settings_of_both_image_processor_files_are_read(tmp_path: Path) -> None:
    nested = {"image_processor": {"image_mean": [0.1, 0.2, 0.3]}, "processor_class": "Qwen3VLProcessor"}
    preprocessor = {"image_std": [0.4, 0.4, 0.4], "image_mean": [0.9, 0.9, 0.9]}
    folder = folder_with(tmp_path, QWEN, preprocessor_config=preprocessor, processor_config=nested)
    processor = image_processor(*(read_vision_config(folder) or pytest.fail("no vision part")))
    assert (processor.mean, processor.std) == ((0.1, 0.2, 0.3), (0.4, 0.4, 0.4))


@pytest.mark.parametrize(
    "settings",
    [
        {"do_resize": False},
        {"do_normalize": False},
        {"do_pan_and_scan": True},
        {"image_std": [0.0, 1.0, 1.0]},
        {"image_mean": [float("nan")] * 3},
        {"image_mean": 0.5},
        {"resample": 9},
        {"size": {"shortest_edge": "x"}},
        {"size": 224},
        {"rescale_factor": 0},
    ],
)
def test_invalid_image_processor_setting_is_rejected(settings: dict[str, Any], tmp_path: Path) -> None:
    folder = folder_with(tmp_path, QWEN, preprocessor_config=settings)
    with pytest.raises(ModelFileError, match="preprocessor"):
        image_processor(*(read_vision_config(folder) or pytest.fail("no vision part")))


def test_vision_checkpoint_contains_only_the_tensors_of_the_vision_part(tmp_path: Path) -> None:
    with open_vision_checkpoint(folder_with(tmp_path, QWEN)) or pytest.fail("no vision part") as checkpoint:
        assert checkpoint.names() == ["norm.weight", "blocks.0.norm1.weight"]
        assert checkpoint.total_bytes == 16
        with pytest.raises(ModelFileError, match=r"no tensor model\.language_model\.norm\.weight"):
            checkpoint.read("model.language_model.norm.weight")


def test_mmproj_file_with_16_bits_is_preferred_to_other_precisions(tmp_path: Path) -> None:
    model = tmp_path / "Qwen3.5-4B-Q4_K_M.gguf"
    model.touch()
    assert mmproj_beside(model) is None
    for name in ("mmproj-Qwen-F32.gguf", "mmproj-Qwen-Q8_0.gguf", "Qwen-mmproj-f16.gguf"):
        (tmp_path / name).touch()
    for path in (model, tmp_path):
        found = mmproj_beside(path)
        assert found is not None
        assert found.name == "Qwen-mmproj-f16.gguf"


def headers(folder: Path, **lengths: int | None) -> None:
    """Write GGUF files that only state the width of their embeddings; `_` in a name stands for `-`."""
    for name, length in lengths.items():
        projects = "mmproj" in name
        writer = gguf.GGUFWriter(folder / f"{name.replace('_', '-')}.gguf", "clip" if projects else "llama")
        if length is not None:
            writer.add_uint32("clip.vision.projection_dim" if projects else "llama.embedding_length", length)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()


@pytest.mark.parametrize(
    ("model", "found"),
    [
        ("Llama-8B-Q4", None),  # the other files do not fit
        ("Qwen-VL-4B-Q8", "mmproj-Qwen-VL-4B-f32.gguf"),  # the name decides before the precision
        ("Gemma-4B-Q8", "gemma-4B-mmproj-f16.gguf"),
        ("Other-Q4", "gemma-4B-mmproj-f16.gguf"),
        ("Old-Q4", "mmproj-Old.gguf"),  # without a width
    ],
)
def test_only_an_mmproj_file_that_fits_the_model_is_used(tmp_path: Path, model: str, found: str | None) -> None:
    headers(tmp_path, Llama_8B_Q4=4096, Qwen_VL_4B_Q8=2560, Gemma_4B_Q8=2560, Other_Q4=2560, Old_Q4=1024)
    headers(tmp_path, mmproj_Qwen_VL_4B_f32=2560, gemma_4B_mmproj_f16=2560, mmproj_Qwen_VL_7B_f16=3584)
    if model == "Old-Q4":
        headers(tmp_path, mmproj_Old=None)
    beside = mmproj_beside(tmp_path / f"{model}.gguf")
    assert found == (beside.name if beside else None)


def test_mmproj_file_of_another_model_is_not_used_in_a_folder(tmp_path: Path) -> None:
    headers(tmp_path, Llama_8B_Q4=4096, mmproj_F16=2560)
    assert mmproj_beside(tmp_path) is None
    assert not has_vision(tmp_path / "Llama-8B-Q4.gguf")


def mmproj(folder: Path, **changes: Any) -> Path:
    """Write an `mmproj` file of a Qwen3-VL model without blocks. A change to None removes the key."""
    keys: dict[str, Any] = {
        "projector_type": "qwen3vl_merger",
        "use_gelu": True,
        "vision.block_count": 2,
        "vision.embedding_length": 64,
        "vision.feed_forward_length": 96,
        "vision.attention.head_count": 2,
        "vision.patch_size": 16,
        "vision.image_mean": [0.5] * 3,
        "vision.image_std": [0.5] * 3,
    } | {name.replace("__", "."): value for name, value in changes.items()}
    writer = gguf.GGUFWriter(folder / "mmproj.gguf", changes.get("architecture", "clip"))
    for key, value in keys.items():
        add = {str: writer.add_string, int: writer.add_uint32, bool: writer.add_bool, list: writer.add_array}
        if value is not None and key != "architecture":
            add[type(value)](f"clip.{key}", value)
    writer.add_tensor("v.position_embd.weight", np.zeros((49, 64), np.float32))
    writer.add_tensor("v.unknown.weight", np.zeros(2, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder / "mmproj.gguf"


@pytest.mark.parametrize(
    ("flags", "model_type"), [(None, "qwen3_5"), ([False, False], "qwen3_5"), ([False, True], "qwen3_vl")]
)
def test_mmproj_file_without_deepstack_layers_is_read_as_qwen3_5(
    flags: list[bool] | None, model_type: str, tmp_path: Path
) -> None:
    file = mmproj(tmp_path, vision__is_deepstack_layers=flags)
    settings = read_vision_config(tmp_path, file) or pytest.fail("no vision part")
    assert settings.config["model_type"] == model_type
    assert settings.config["vision_config"].get("deepstack_visual_indexes") == ([1] if flags and any(flags) else None)
    assert settings.config["vision_config"]["num_position_embeddings"] == 49


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"projector_type": "ultravox"}, "unsupported projector 'ultravox'; supported: "),
        ({"projector_type": None}, "unsupported projector 'none'"),
        ({"architecture": "llama"}, "is not an mmproj file: its architecture is 'llama', expected 'clip'"),
        ({"vision__block_count": None}, r"key clip\.vision\.block_count is missing"),
        ({"vision__patch_size": 0}, r"key clip\.vision\.patch_size is not one whole number"),
        ({"vision__image_mean": None}, r"key clip\.vision\.image_mean is not a list of numbers"),
        ({"vision__is_deepstack_layers": [True]}, r"is_deepstack_layers must be a list of 2 booleans"),
    ],
)
def test_invalid_mmproj_file_is_rejected(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=message):
        read_vision_config(tmp_path, mmproj(tmp_path, **changes))


def test_mmproj_file_that_names_no_activation_is_read_as_quick_gelu(tmp_path: Path) -> None:
    settings = read_vision_config(tmp_path, mmproj(tmp_path, use_gelu=None)) or pytest.fail("no vision part")
    assert settings.config["vision_config"]["hidden_act"] == "quick_gelu"
