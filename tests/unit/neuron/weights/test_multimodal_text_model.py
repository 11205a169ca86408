"""The text model of multimodal checkpoints that transformers wrote."""

import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForImageTextToText

from helexa.core.errors import ModelFileError
from helexa.neuron.weights.checkpoint import open_checkpoint

TEXT = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64}
TEXT |= {"num_key_value_heads": 1, "head_dim": 16}
VISION = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "depth": 1, "num_hidden_layers": 1}


def multimodal(folder: Path, model_type: str) -> set[str]:
    """Write a checkpoint of `model_type`; return the text model's tensor names as a text-only model has them."""
    vision = VISION | (
        {"out_hidden_size": 32} if model_type.startswith("qwen") else {"image_size": 28, "patch_size": 14}
    )
    config = AutoConfig.for_model(model_type, text_config=TEXT, vision_config=vision, mm_tokens_per_image=4)
    model = AutoModelForImageTextToText.from_config(config)
    model.save_pretrained(folder)
    return {f"model.{name}" for name in model.model.language_model.state_dict()}


@pytest.mark.parametrize("model_type", ["qwen3_5", "gemma3"])
def test_only_the_text_model_of_a_multimodal_checkpoint_is_exposed_under_plain_names(
    model_type: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = multimodal(tmp_path, model_type)
    with caplog.at_level(logging.INFO), open_checkpoint(tmp_path) as checkpoint:
        assert set(checkpoint.names()) - {"lm_head.weight"} == expected
        assert checkpoint.config["model_type"] == model_type
        assert {key: checkpoint.config[key] for key in TEXT} == TEXT
        assert checkpoint.shape("model.embed_tokens.weight") == (64, 32)
        stored = sum(checkpoint.read(name).nbytes for name in checkpoint.names())
        assert checkpoint.total_bytes == stored
    (line,) = [record.getMessage() for record in caplog.records]
    assert "skipped" in line
    assert "vis" in line


def write(folder: Path, names: list[str], config: object) -> Path:
    save_file({name: torch.full((2, 2), float(n)) for n, name in enumerate(names)}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


NESTED = {"model_type": "some", "text_config": {"model_type": "gemma3_text", "hidden_size": 8}}


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
def test_output_head_is_found_at_the_top_level_or_under_the_text_model_prefix(prefix: str, tmp_path: Path) -> None:
    head = "language_model.lm_head.weight" if prefix.startswith("language") else "lm_head.weight"
    names = ["model.visual.patch.weight", f"{prefix}embed_tokens.weight", head, "mtp.fc.weight", "audio_tower.x"]
    with open_checkpoint(write(tmp_path, names, NESTED)) as checkpoint:
        assert set(checkpoint.names()) == {"model.embed_tokens.weight", "lm_head.weight"}
        assert checkpoint.read("lm_head.weight")[0, 0] == 2


@pytest.mark.parametrize("prefix", ["", "language_model."])
def test_tensor_names_of_a_model_without_output_head_get_the_usual_prefix(prefix: str, tmp_path: Path) -> None:
    # Embedding models, such as Qwen3-Embedding.
    names = [f"{prefix}{name}.weight" for name in ("embed_tokens", "layers.0.mlp.up_proj", "norm")]
    with open_checkpoint(write(tmp_path, [*names, "visual.x"], NESTED)) as checkpoint:
        assert checkpoint.names() == [
            "model.embed_tokens.weight",
            "model.layers.0.mlp.up_proj.weight",
            "model.norm.weight",
        ]
        assert checkpoint.stored_name("model.norm.weight") == f"{prefix}norm.weight"


@pytest.mark.parametrize("tied", [True, None])
def test_tied_embedding_stored_only_as_output_head_is_used_as_the_embedding(tied: bool | None, tmp_path: Path) -> None:
    config = {"model_type": "llama"} if tied is None else {"model_type": "llama", "tie_word_embeddings": tied}
    with open_checkpoint(write(tmp_path, ["lm_head.weight", "model.norm.weight"], config)) as checkpoint:
        assert set(checkpoint.names()) == {"model.embed_tokens.weight", "model.norm.weight"}
        assert checkpoint.read("model.embed_tokens.weight")[0, 0] == 0


@pytest.mark.parametrize(
    ("names", "tied"),
    [(["lm_head.weight"], False), (["lm_head.weight", "model.embeddings.weight"], True)],
)
def test_output_head_that_is_not_tied_is_not_used_as_the_embedding(
    names: list[str], tied: bool, tmp_path: Path
) -> None:
    config = {"model_type": "llama", "tie_word_embeddings": tied}
    with open_checkpoint(write(tmp_path, names, config)) as checkpoint:
        assert checkpoint.names() == names


def test_text_only_model_skips_only_its_multi_token_prediction_layers(tmp_path: Path) -> None:
    names = ["model.norm.weight", "mtp.layers.0.norm.weight", "rope_freqs.weight"]
    with open_checkpoint(write(tmp_path, names, {"model_type": "qwen3_next"})) as checkpoint:
        assert set(checkpoint.names()) == {"model.norm.weight", "rope_freqs.weight"}


def test_plain_tensor_names_with_a_nested_configuration_are_accepted(tmp_path: Path) -> None:
    names = ["model.norm.weight", "model.visual.norm.weight", "visual.x", "model.vision_tower.x"]
    with open_checkpoint(write(tmp_path, names, NESTED)) as checkpoint:
        assert checkpoint.names() == ["model.norm.weight"]


def test_keys_missing_in_text_config_come_from_the_outer_configuration(tmp_path: Path) -> None:
    outer = {"tie_word_embeddings": True, "hidden_size": 3, "vision_config": {"depth": 2}, "eos_token_id": [1, 2]}
    with open_checkpoint(write(tmp_path, ["model.norm.weight"], outer | NESTED)) as checkpoint:
        config = checkpoint.config
    assert config == {"model_type": "gemma3", "hidden_size": 8, "tie_word_embeddings": True, "eos_token_id": [1, 2]}


def test_model_type_gemma3_text_is_read_without_its_suffix(tmp_path: Path) -> None:
    with open_checkpoint(write(tmp_path, ["model.norm.weight"], {"model_type": "gemma3_text"})) as checkpoint:
        assert checkpoint.config == {"model_type": "gemma3"}


@pytest.mark.parametrize("inner", ["text", [1], 3])
def test_text_config_that_is_not_an_object_is_rejected(inner: object, tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="'text_config' is not an object"):
        open_checkpoint(write(tmp_path, ["a"], {"text_config": inner}))


def test_two_tensors_with_the_same_plain_name_are_rejected(tmp_path: Path) -> None:
    names = ["language_model.lm_head.weight", "lm_head.weight"]
    with pytest.raises(ModelFileError, match=r"lm_head\.weight and .*lm_head\.weight are both named"):
        open_checkpoint(write(tmp_path, names, NESTED))
