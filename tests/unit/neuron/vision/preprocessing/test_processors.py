"""Patches and layouts equal those of transformers' image processors."""

import ast
import importlib.util
import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from helexa.core.errors import ModelFileError
from helexa.neuron.vision.decode import ImageLimits
from helexa.neuron.vision.image_tokens_and_errors import ImageError
from helexa.neuron.vision.processor_choice import ImageProcessor, PreparedImage, image_layout, image_processor, prepare
from neuron.vision.images import SIZES, encoded, noise

ALL = 1 << 20
QWEN3 = {"vision_config": {"patch_size": 16, "spatial_merge_size": 2}}
QWEN2_5 = {"model_type": "qwen2_5_vl", "vision_config": {"patch_size": 14, "spatial_merge_size": 2}}


def prepared(image: Image.Image, processor: ImageProcessor, max_tokens: int = ALL) -> PreparedImage:
    return prepare(encoded(image), processor, ImageLimits(), max_tokens, _array)


def _array(shape: tuple[int, int]) -> NDArray[np.float32]:
    return np.empty(shape, np.float32)


def near(actual: NDArray[Any], expected: NDArray[Any]) -> None:
    assert actual.dtype == np.float32
    np.testing.assert_allclose(actual, expected.reshape(actual.shape), rtol=0, atol=1e-5)


def patches_of(pixels: NDArray[Any], size: int, merge: int = 1) -> NDArray[Any]:
    """Return the patches of tiles [tiles, 3, height, width], [patches, 3 * size ** 2].

    The blocks of `merge` x `merge` patches are in the order of rows, and so are the patches of a block.
    """
    tiles, channels, height, width = pixels.shape
    block = size * merge
    grid = pixels.reshape(tiles, channels, height // block, merge, size, width // block, merge, size)
    return grid.transpose(0, 2, 5, 3, 6, 1, 4, 7).reshape(-1, channels * size**2)


@pytest.mark.parametrize(("width", "height"), SIZES)
@pytest.mark.parametrize(
    ("config", "reference"),
    [
        pytest.param(
            {"model_type": model_type, **QWEN3},
            {
                "patch_size": 16,
                "size": {"shortest_edge": 65536, "longest_edge": 16777216},
                "image_mean": [0.5] * 3,
                "image_std": [0.5] * 3,
            },
            marks=marks,
        )
        for model_type, marks in (
            ("qwen3_5", ()),
            ("qwen3_5_moe", pytest.mark.nightly),
            ("qwen3_vl", pytest.mark.nightly),
        )
    ]
    + [(QWEN2_5, {"size": {"shortest_edge": 3136, "longest_edge": 12845056}})],
    ids=lambda config: config.get("model_type", ""),
)
def test_qwen_patches_equal_those_of_transformers(
    config: dict[str, Any], reference: dict[str, Any], width: int, height: int
) -> None:
    image = noise(width, height)
    result = prepared(image, image_processor(config, {}))
    expected = Qwen2VLImageProcessorPil(**reference)(image, return_tensors="np")
    (grid,) = result.layout.tiles
    assert (1, *grid) == tuple(expected["image_grid_thw"][0])
    assert result.layout.tokens == grid.size // 4
    both_frames = expected["pixel_values"].reshape(len(result.pixels), 3, 2, -1)
    for frame in range(2):
        near(result.pixels.reshape(len(result.pixels), 3, -1), both_frames[:, :, frame])


@pytest.mark.parametrize(("width", "height"), SIZES)
@pytest.mark.parametrize(("size", "patch_size"), [(896, 14), (224, 14), (64, 16)])
def test_gemma3_patches_equal_those_of_transformers(size: int, patch_size: int, width: int, height: int) -> None:
    config = {"model_type": "gemma3", "vision_config": {"image_size": size, "patch_size": patch_size}}
    image = noise(width, height)
    result = prepared(image, image_processor(config, {}))
    expected = Gemma3ImageProcessorPil(size={"height": size, "width": size})(image, return_tensors="np")
    near(result.pixels, patches_of(expected["pixel_values"], patch_size))
    assert result.layout.tokens == 256


@pytest.mark.parametrize(
    ("tokens", "width", "height"), [(280, *size) for size in (*SIZES[:5], (5000, 20), (10, 3000))] + [(70, 640, 480)]
)
def test_gemma4_patches_equal_those_of_transformers(tokens: int, width: int, height: int) -> None:
    vision = {"patch_size": 16, "pooling_kernel_size": 3, "position_embedding_size": 10240}
    processor = image_processor({"model_type": "gemma4", "vision_config": vision}, {"max_soft_tokens": tokens})
    image = noise(width, height)
    result = prepared(image, processor)
    expected = Gemma4ImageProcessorPil(max_soft_tokens=tokens)(image, return_tensors="np")
    rows, columns = result.layout.tiles[0]
    patches = expected["pixel_values"][0, : rows * columns].reshape(1, rows, columns, 16, 16, 3)
    pixels = patches.transpose(0, 5, 1, 3, 2, 4).reshape(1, 3, rows * 16, columns * 16)
    near(result.pixels, patches_of(2 * pixels - 1, 16, 3))  # the tower of transformers normalizes
    assert result.layout.tokens == expected["num_soft_tokens_per_image"][0] <= tokens
    assert image_layout(processor, width, height, 16).tokens <= 16


def test_gemma4_rejects_a_normalization_that_transformers_would_apply() -> None:
    vision = {"patch_size": 16, "pooling_kernel_size": 3, "position_embedding_size": 10240}
    for settings in ({"image_mean": [0.5] * 3}, {"image_std": [0.5] * 3, "do_normalize": True}):
        with pytest.raises(ModelFileError, match="image_mean"):
            image_processor({"model_type": "gemma4", "vision_config": vision}, settings)


def muse_glimmer_resize() -> Callable[..., tuple[int, int]]:
    """Return `smart_resize` of transformers. Its module requires torchvision."""
    spec = importlib.util.find_spec("transformers.models.muse_glimmer.image_processing_muse_glimmer")
    assert spec is not None and spec.origin is not None
    tree = ast.parse(Path(spec.origin).read_text())
    tree.body = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "smart_resize"]
    namespace: dict[str, Any] = {"itertools": itertools, "math": math}
    exec(compile(tree, "smart_resize", "exec"), namespace)
    return namespace["smart_resize"]


@pytest.mark.parametrize("tokens", [1, 40, 4096])
def test_muse_glimmer_image_sizes_equal_those_of_transformers(tokens: int) -> None:
    config = {"model_type": "muse_glimmer", "vision_config": {"patch_size": 14, "merge_size": 2}}
    processor, resize = image_processor(config, {"max_image_tokens": tokens}), muse_glimmer_resize()
    for width, height in (*SIZES, (640, 480), (1920, 1080), (20, 20), (3000, 2999), (4000, 50)):
        layout = image_layout(processor, width, height, ALL)
        columns, rows = layout.sizes[0]
        expected = resize(height, width, patch_size=28, max_tokens=tokens)
        # An image with one long side has more tokens in transformers than the limit.
        assert (rows, columns) == expected or expected[0] * expected[1] > tokens * 28**2
        assert 0 < layout.tokens <= tokens


@pytest.mark.parametrize(("width", "height"), [*SIZES, (1540, 1541)])
def test_pixtral_patches_equal_those_of_transformers(width: int, height: int) -> None:
    config = {"model_type": "mistral3", "vision_config": {"image_size": 1540, "patch_size": 14}}
    image = noise(width, height)
    result = prepared(image, image_processor(config, {}))
    expected = PixtralImageProcessorPil(size={"longest_edge": 1540}, patch_size=28)(image, return_tensors="np")
    near(result.pixels, patches_of(expected["pixel_values"], 14, 2))
    assert result.layout.tokens == len(result.pixels) // 4
    assert result.layout.ranges == (result.layout.tiles[0].columns // 2,) * (result.layout.tiles[0].rows // 2)


@pytest.mark.parametrize("max_tokens", [1, 4, 64, 256])
@pytest.mark.parametrize(("width", "height"), [*SIZES, (20000, 10)])
def test_pixtral_image_is_shrunk_to_the_maximum_number_of_tokens(width: int, height: int, max_tokens: int) -> None:
    config = {"model_type": "mistral3", "vision_config": {"image_size": 1540, "patch_size": 14}}
    layout, whole = (image_layout(image_processor(config, {}), width, height, tokens) for tokens in (max_tokens, ALL))
    assert 0 < layout.tokens <= max_tokens
    assert layout == whole if whole.tokens <= max_tokens else layout.rows <= whole.rows
    assert sum(layout.ranges) == layout.tokens


@pytest.mark.parametrize(("width", "height"), [*SIZES, (5000, 300), (300, 5000), (1, 3000), (728, 364)])
@pytest.mark.parametrize(
    ("model_type", "reference", "patch_size", "tile", "edge", "splits"),
    [
        ("idefics3", Idefics3ImageProcessorPil, 14, 364, 1456, True),
        pytest.param("idefics3", Idefics3ImageProcessorPil, 14, 364, 1456, False, marks=pytest.mark.nightly),
        pytest.param("smolvlm", SmolVLMImageProcessorPil, 16, 512, 2048, True, marks=pytest.mark.nightly),
        ("smolvlm", SmolVLMImageProcessorPil, 16, 512, 2048, False),
    ],
)
def test_idefics3_tiles_equal_those_of_transformers(
    model_type: str, reference: Any, patch_size: int, tile: int, edge: int, splits: bool, width: int, height: int
) -> None:
    config = {"model_type": model_type, "vision_config": {"image_size": tile, "patch_size": patch_size}}
    settings = {
        "size": {"longest_edge": edge},
        "max_image_size": {"longest_edge": tile},
        "do_image_splitting": splits,
    }
    image = noise(width, height)
    result = prepared(image, image_processor(config, settings))
    expected = reference(**settings)(image, return_tensors="np", return_row_col_info=True)
    near(result.pixels, patches_of(expected["pixel_values"][0], patch_size))
    assert result.layout.split == (expected["rows"][0][0], expected["cols"][0][0])
    assert len(result.layout.tiles) == expected["pixel_values"].shape[1]
    assert result.layout.tokens == len(result.layout.tiles) * (tile // patch_size // 2) ** 2


def test_resize_filter_and_normalization_of_the_checkpoint_are_used() -> None:
    settings = {"resample": 1, "image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6], "rescale_factor": 1 / 127}
    image = noise(300, 200)
    result = prepared(image, image_processor({"model_type": "qwen3_vl", **QWEN3}, settings))
    expected = Qwen2VLImageProcessorPil(
        patch_size=16, size={"shortest_edge": 65536, "longest_edge": 16777216}, **settings
    )(image, return_tensors="np")
    near(
        result.pixels.reshape(len(result.pixels), 3, -1),
        expected["pixel_values"].reshape(len(result.pixels), 3, 2, -1)[:, :, 0],
    )


@pytest.mark.parametrize("max_tokens", [1, 4, 64, 256, 1024])
@pytest.mark.parametrize(("width", "height"), [*SIZES, (200, 40000), (40000, 200)])
def test_qwen_image_is_shrunk_to_the_maximum_number_of_tokens(width: int, height: int, max_tokens: int) -> None:
    processor = image_processor({"model_type": "qwen3_5", **QWEN3}, {})
    layout, whole = (image_layout(processor, width, height, tokens) for tokens in (max_tokens, ALL))
    assert layout.tokens <= max_tokens
    if whole.tokens <= max_tokens:
        assert layout == whole
    elif max_tokens >= 64 and max(width, height) < 10 * min(width, height):
        assert layout.tokens > max_tokens / 2
        ratio = layout.tiles[0].columns / layout.tiles[0].rows
        assert ratio == pytest.approx(width / height, rel=0.3)


def test_idefics3_image_is_divided_into_fewer_tiles_if_it_may_have_fewer_tokens() -> None:
    processor = image_processor({"model_type": "idefics3", "vision_config": {"image_size": 364, "patch_size": 14}}, {})
    layouts = [image_layout(processor, 1456, 1456, tokens) for tokens in (17 * 169, 17 * 169 - 1, 5 * 169, 169, 1)]
    assert [layout.split for layout in layouts] == [(4, 4), (3, 3), (2, 2), (0, 0), (0, 0)]
    assert [layout.tokens for layout in layouts] == [17 * 169, 10 * 169, 5 * 169, 169, 169]
    image = noise(1456, 1456)
    assert len(prepared(image, processor, 5 * 169).pixels) == 5 * 26 * 26


@pytest.mark.parametrize(("width", "height"), [(1, 20000), (20000, 1), (1, 201)])
def test_qwen_rejects_an_extreme_aspect_ratio(width: int, height: int) -> None:
    processor = image_processor({"model_type": "qwen3_5", **QWEN3}, {})
    with pytest.raises(ImageError, match=f"{width} x {height} pixels; one side may be at most 200 times as long"):
        prepared(noise(width, height), processor)


def test_image_digest_depends_on_pixels_size_and_processor_settings() -> None:
    processor = image_processor({"model_type": "qwen3_5", **QWEN3}, {})
    image = noise(64, 96)
    changed = image.copy()
    changed.putpixel((63, 95), (0, 0, 0))
    bicubic = image_processor({"model_type": "qwen3_5", **QWEN3}, {"resample": 2})
    digests = [
        prepared(image, processor).digest,
        prepared(image.transpose(Image.Transpose.TRANSPOSE), processor).digest,
        prepared(changed, processor).digest,
        prepared(image, bicubic).digest,
        prepared(image, processor, 16).digest,
    ]
    assert len(set(digests)) == len(digests)
    assert all(len(digest) == 32 for digest in digests)
    assert prepare(encoded(image, "PNG", compress_level=1), processor, ImageLimits(), ALL, _array).digest == digests[0]


def test_images_that_differ_only_in_their_palette_have_different_digests() -> None:
    processor = image_processor({"model_type": "qwen3_5", **QWEN3}, {})
    first = Image.new("P", (64, 64))
    second = first.copy()
    first.putpalette([255, 0, 0])
    second.putpalette([0, 0, 255])
    assert first.tobytes() == second.tobytes()
    assert prepared(first, processor).digest != prepared(second, processor).digest
