"""Vision towers compute the same embeddings as transformers, from every format of weights and with all kernels."""

from itertools import product
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from torch import Tensor

from helexa.core.errors import ModelFileError
from helexa.neuron.ops.interface import Ops
from helexa.neuron.ops.native.kernel_library import Unavailable, native_kernels
from helexa.neuron.ops.native.native_ops import NativeOps
from helexa.neuron.ops.reference.reference_ops import ReferenceOps
from helexa.neuron.ops.triton.gpu_ops import GpuOps
from helexa.neuron.vision.processor_choice import image_processor
from helexa.neuron.weights.quantization_formats import VisionQuantPolicy
from helexa.neuron.weights.vision_checkpoint import open_vision_checkpoint
from neuron.ops.paging import CPU
from nightly import daily
from reference.hf_to_mmproj import CLIP, PROJECTORS, write_mmproj
from reference.vision_models import MODELS, SIZES, encode, expected_features, open_tower, prepared_images, save_model

TOLERANCE = 1e-4


def near(actual: Tensor, expected: Tensor, share: float) -> None:
    """Assert that the error is at most `share` of the largest expected value."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=share * float(expected.abs().max()))


@pytest.mark.parametrize("model_type", MODELS)
def test_image_embeddings_equal_those_of_transformers(model_type: str, tmp_path: Path) -> None:
    """The images have several sizes, and transformers computes all images in one batch."""
    model = save_model(tmp_path, model_type)
    tower, checkpoint = open_tower(tmp_path)
    images = prepared_images(checkpoint)
    expected = expected_features(model, images)
    assert tower.width == expected[0].embeddings.shape[-1]
    for image, wanted in zip(images, expected, strict=True):
        features = encode(tower, image)
        assert features.embeddings.dtype == torch.float32
        assert features.embeddings.shape == (image.layout.tokens, tower.width)
        torch.testing.assert_close(features.embeddings, wanted.embeddings, rtol=0, atol=TOLERANCE)
        assert len(features.deepstack) == len(wanted.deepstack) == (2 if model_type == "qwen3_vl" else 0)
        for layer, wanted_layer in zip(features.deepstack, wanted.deepstack, strict=True):
            torch.testing.assert_close(layer, wanted_layer, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("model_type", MODELS)
def test_embeddings_of_two_images_differ_by_more_than_the_test_tolerance(model_type: str, tmp_path: Path) -> None:
    """Otherwise the comparisons of these tests would not notice that images were exchanged."""
    save_model(tmp_path, model_type)
    tower, checkpoint = open_tower(tmp_path)
    first, second = (encode(tower, image).embeddings for image in prepared_images(checkpoint, SIZES[:1] * 2))
    assert float((first - second).abs().max()) > 100 * TOLERANCE


def test_pixtral_with_hidden_act_gelu_uses_exact_gelu(tmp_path: Path) -> None:
    model = save_model(tmp_path, "mistral3", hidden_act="gelu")
    tower, checkpoint = open_tower(tmp_path)
    image = prepared_images(checkpoint, [(90, 70)])[0]
    expected = expected_features(model, [image])[0].embeddings
    torch.testing.assert_close(encode(tower, image).embeddings, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("model_type", PROJECTORS)
def test_image_embeddings_from_an_mmproj_file_equal_those_of_transformers(model_type: str, tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", model_type)
    write_mmproj(tmp_path / "mmproj-F32.gguf", model)
    (tmp_path / "model.gguf").touch()
    tower, checkpoint = open_tower(tmp_path / "model.gguf")
    images = prepared_images(checkpoint)
    for image, wanted in zip(images, expected_features(model, images), strict=True):
        features = encode(tower, image)
        torch.testing.assert_close(features.embeddings, wanted.embeddings, rtol=0, atol=TOLERANCE)
        for layer, wanted_layer in zip(features.deepstack, wanted.deepstack, strict=True):
            torch.testing.assert_close(layer, wanted_layer, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("quantization", "share"),
    [
        (gguf.GGMLQuantizationType.F16, 2e-3),
        (gguf.GGMLQuantizationType.BF16, 2e-2),
        (gguf.GGMLQuantizationType.Q8_0, 4e-2),
    ],
)
@pytest.mark.parametrize("model_type", ["qwen3_vl", "qwen2_5_vl", "gemma3"])
def test_image_embeddings_from_a_quantized_mmproj_file_are_close_to_transformers(
    model_type: str, quantization: gguf.GGMLQuantizationType, share: float, tmp_path: Path
) -> None:
    model = save_model(tmp_path / "model", model_type)
    write_mmproj(tmp_path / "mmproj.gguf", model, quantization)
    tower, checkpoint = open_tower(tmp_path, mmproj=tmp_path / "mmproj.gguf")
    image = prepared_images(checkpoint, [(200, 120)])[0]
    near(encode(tower, image).embeddings, expected_features(model, [image])[0].embeddings, share)


def test_old_mmproj_file_with_swapped_tensor_names_gives_the_same_embeddings(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", "gemma3")
    write_mmproj(tmp_path / "mmproj.gguf", model, swapped=True)
    tower, checkpoint = open_tower(tmp_path)
    image = prepared_images(checkpoint, [(200, 120)])[0]
    expected = expected_features(model, [image])[0].embeddings
    torch.testing.assert_close(encode(tower, image).embeddings, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(("model_type", "mean"), [("qwen3_vl", (0.5, 0.5, 0.5)), ("qwen2_5_vl", tuple(CLIP[0]))])
def test_clip_normalization_in_an_mmproj_file_is_corrected_for_qwen3_vl_only(
    model_type: str, mean: tuple[float, ...], tmp_path: Path
) -> None:
    """Qwen3-VL never has CLIP's numbers, but Qwen2.5-VL has."""
    write_mmproj(tmp_path / "mmproj.gguf", save_model(tmp_path / "model", model_type), normalization=CLIP)
    with open_vision_checkpoint(tmp_path) or pytest.fail("no checkpoint") as checkpoint:
        assert image_processor(checkpoint.config, checkpoint.preprocessor).mean == pytest.approx(mean)


OPS = ("native", "triton", "bfloat16")


@pytest.fixture(params=OPS)
def ops(request: pytest.FixtureRequest) -> Ops:
    if request.param == "triton":
        return GpuOps(CPU, torch.float32)
    if request.param == "bfloat16":
        return ReferenceOps(CPU, torch.bfloat16)
    try:
        return NativeOps(native_kernels(), 2)
    except Unavailable as reason:
        pytest.skip(str(reason))


def with_ops(models: list[str], interpreted: list[str]) -> pytest.MarkDecorator:
    """Return a decorator that runs a test for each of `models` with all kernels.

    Args:
        interpreted: models that `make test` runs with the Triton kernels, for which the interpreter takes seconds.
    """
    every = list(product(models, OPS))
    quick = [(model, ops) for model, ops in every if ops != "triton" or model in interpreted]
    return pytest.mark.parametrize(("model_type", "ops"), daily(quick, every, several=True), indirect=["ops"])


@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
@with_ops(["qwen3_vl", "qwen2_5_vl", "gemma3", "smolvlm"], ["qwen3_vl", "gemma3"])
def test_image_embeddings_of_all_kernels_are_close_to_transformers(model_type: str, ops: Ops, tmp_path: Path) -> None:
    model = save_model(tmp_path, model_type)
    tower, checkpoint = open_tower(tmp_path, ops)
    image = prepared_images(checkpoint, [(90, 70)])[0]
    features, expected = encode(tower, image), expected_features(model, [image])[0]
    share = 2e-5 if ops.name == "triton" else 4e-2
    near(features.embeddings, expected.embeddings, share)
    for layer, wanted in zip(features.deepstack, expected.deepstack, strict=True):
        near(layer, wanted, share)


@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
@with_ops(["qwen3_5", "idefics3"], ["qwen3_5"])
def test_vision_tower_quantized_at_load_is_smaller_and_close_to_transformers(
    model_type: str, ops: Ops, tmp_path: Path
) -> None:
    model = save_model(tmp_path, model_type)
    tower, checkpoint = open_tower(tmp_path, ops, policy=VisionQuantPolicy("q4k"))
    new_ops: Any = type(ops)
    plain_bytes, quantized_bytes = (
        open_tower(tmp_path, new_ops(*_arguments(ops)), policy=VisionQuantPolicy(quant))[0].loader.matrix_bytes
        for quant in ("", "q4k")
    )
    assert not ops.quantized or quantized_bytes < 0.8 * plain_bytes
    image = prepared_images(checkpoint, [(90, 70)])[0]
    near(encode(tower, image).embeddings, expected_features(model, [image])[0].embeddings, 6e-2)


def _arguments(ops: Ops) -> tuple[object, ...]:
    return (native_kernels(), 2) if isinstance(ops, NativeOps) else (CPU, ops.dtype)


@pytest.mark.parametrize(
    ("model_type", "key", "value"),
    [
        ("qwen3_5", "hidden_act", "quick_gelu"),
        ("qwen3_5", "num_position_embeddings", 50),
        ("qwen3_5", "temporal_patch_size", 1),
        ("qwen3_5", "hidden_size", 100),
        ("qwen3_5", "depth", 4),
        ("qwen3_vl", "deepstack_visual_indexes", [0, 9]),
        ("qwen2_5_vl", "window_size", 14),
        ("gemma3", "image_size", 224),
        ("gemma3", "hidden_act", "relu"),
        ("gemma4", "hidden_activation", "silu"),
        ("gemma4", "head_dim", 26),
        ("mistral3", "hidden_act", "gelu_new"),
        ("mistral3", "rope_parameters", {"rope_type": "yarn", "rope_theta": 10000.0}),
        ("mistral3", "rope_parameters", {"rope_theta": 0}),
        ("muse_glimmer", "hidden_act", "silu"),
        ("muse_glimmer", "pos_emb_width", 5),
        ("muse_glimmer", "layer_types", ["full_attention"]),
        ("muse_glimmer", "patch_temporal", 1),
        ("idefics3", "patch_size", 16),
    ],
)
def test_unsupported_or_wrong_vision_setting_is_rejected(
    model_type: str, key: str, value: object, tmp_path: Path
) -> None:
    save_model(tmp_path, model_type)
    with open_vision_checkpoint(tmp_path) or pytest.fail("no checkpoint") as checkpoint:
        checkpoint.config["vision_config"][key] = value
        with pytest.raises(ModelFileError):
            _build(checkpoint)


@pytest.mark.parametrize(
    ("model_type", "key", "value"),
    [
        ("llava", "vision_feature_layer", -2),
        ("llava", "vision_feature_layer", None),  # LLaVA's default is -2
        ("llava", "vision_feature_select_strategy", "default"),
        ("llava", "projector_hidden_act", "relu"),
        ("mistral3", "vision_feature_layer", -2),
        ("mistral3", "spatial_merge_size", 0),
    ],
)
def test_projector_setting_that_is_not_implemented_is_rejected(
    model_type: str, key: str, value: object, tmp_path: Path
) -> None:
    save_model(tmp_path, model_type)
    with open_vision_checkpoint(tmp_path) or pytest.fail("no checkpoint") as checkpoint:
        checkpoint.config[key] = value
        with pytest.raises(ModelFileError, match=key):
            _build(checkpoint)


def _build(checkpoint: object) -> object:
    from helexa.neuron.layers.loader import Loader
    from helexa.neuron.models.vision import tower_class

    loader = Loader(checkpoint, ReferenceOps(CPU, torch.float32), lambda done: None)  # type: ignore[arg-type]
    return tower_class(checkpoint.config["model_type"])(checkpoint.config, loader)  # type: ignore[attr-defined]
