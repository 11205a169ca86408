"""Choose an image processor by a model's settings, and prepare images with it."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from helexa.core.errors import ModelFileError, UnsupportedModelError
from helexa.neuron.vision.decode import ImageLimits, decode
from helexa.neuron.vision.image_tokens_and_errors import MAX_PATCHES, ImageError, ImageLayout
from helexa.neuron.vision.processors import (
    CLIP_MEAN,
    CLIP_STD,
    HALF,
    Gemma3Processor,
    Gemma4Processor,
    Idefics3Processor,
    MuseGlimmerProcessor,
    PixtralProcessor,
    QwenVlProcessor,
)

# The image processor of a model: `Pixels` with the methods `layout` and `tiles`.
ImageProcessor = (
    QwenVlProcessor | Gemma3Processor | Gemma4Processor | Idefics3Processor | MuseGlimmerProcessor | PixtralProcessor
)

Allocate = Callable[[tuple[int, int]], NDArray[np.float32]]  # returns an uninitialized array of the given shape

_REQUIRED = ("do_resize", "do_rescale", "do_normalize")
_UNSUPPORTED = ("do_pan_and_scan", "do_center_crop")


@dataclass(frozen=True)
class PreparedImage:
    """An image that the chosen processor prepared as the vision tower's input."""

    # size of the image in pixels, before it was resized
    width: int
    height: int
    layout: ImageLayout
    # Float32 [P, 3 * patch_size ** 2], the normalized values of the P patches of all tiles, one tile after another. The
    # values of a patch are in the order channel, row, column.
    pixels: NDArray[np.float32]
    # SHA-256 digest. Two images have the same digest only if their `layout`, their `pixels` and the settings of their
    # image processors are equal.
    digest: bytes


def prepare(
    data: bytes, processor: ImageProcessor, limits: ImageLimits, max_tokens: int, allocate: Allocate
) -> PreparedImage:
    """Decode and resize an image with `processor`; return the image's patches.

    Args:
        max_tokens: maximum number of tokens of the image. If the model's minimum number of tokens per image is larger,
            the image gets this minimum.
        allocate: function that allocates the memory for `PreparedImage.pixels`.

    Raises:
        ImageError: the image cannot be used; the message gives the reason.
    """
    image = decode(data, limits)
    layout = image_layout(processor, image.width, image.height, max_tokens)
    pixels = allocate((layout.patches, processor.patch_values))
    digest = hashlib.sha256(msgspec.json.encode(("RGB", layout, processor)))
    first = 0
    for tile, grid in zip(processor.tiles(image, layout), layout.tiles, strict=True):
        patches = processor.patches(tile)
        digest.update(patches.data)
        processor.normalize(patches, pixels[first : first + grid.size])
        first += grid.size
    return PreparedImage(image.width, image.height, layout, pixels, digest.digest())


def image_layout(processor: ImageProcessor, width: int, height: int, max_tokens: int) -> ImageLayout:
    """Return the layout of a `width` x `height` image (`max_tokens`: see `prepare`).

    Raises:
        ImageError: the model cannot read images with this aspect ratio, or the image would have too many patches.
    """
    layout = processor.layout(width, height, max_tokens)
    if not 0 < layout.patches <= MAX_PATCHES:
        raise ImageError(
            f"the image has {layout.patches} patches after resizing, and the limit is {MAX_PATCHES}; shrink the image"
        )
    return layout


def image_processor(config: Mapping[str, Any], preprocessor: Mapping[str, Any]) -> ImageProcessor:
    """Return the image processor for a model's settings.

    Args:
        config: configuration of the model with the keys of `config.json`. `vision_config` has all settings that the
            configuration class of transformers has.
        preprocessor: settings with the keys of `preprocessor_config.json`. The values that the publishers of the
            models use replace missing settings.

    Raises:
        ModelFileError: a setting is invalid, or a setting or the architecture is not supported (UnsupportedModelError).
    """
    model_type = config.get("model_type")
    if model_type not in _READERS:
        raise UnsupportedModelError(f"unsupported vision architecture '{model_type}'; supported: {', '.join(_READERS)}")
    for key in _REQUIRED:
        if key == "do_normalize" and model_type == "gemma4":
            continue  # the vision tower normalizes the pixels, and `_gemma4` checks that the processor does not
        if preprocessor.get(key) is False:
            raise UnsupportedModelError(f"preprocessor: '{key}' is False; only True is supported")
    for key in _UNSUPPORTED:
        if preprocessor.get(key):
            raise UnsupportedModelError(f"preprocessor: '{key}' is {preprocessor[key]!r}; only False is supported")
    vision = config["vision_config"]
    try:
        return _READERS[model_type](config, vision, preprocessor)
    except (AttributeError, KeyError, TypeError, ValueError, msgspec.ValidationError) as error:
        raise ModelFileError(f"preprocessor: invalid settings: {error!r}") from error


def _qwen3(config: Mapping[str, Any], vision: Mapping[str, Any], preprocessor: Mapping[str, Any]) -> QwenVlProcessor:
    return _qwen(vision, preprocessor, pixels=(65536, 16777216), mean=HALF, std=HALF)


def _qwen2_5(config: Mapping[str, Any], vision: Mapping[str, Any], preprocessor: Mapping[str, Any]) -> QwenVlProcessor:
    return _qwen(vision, preprocessor, pixels=(3136, 12845056), mean=CLIP_MEAN, std=CLIP_STD)


def _qwen(
    vision: Mapping[str, Any],
    preprocessor: Mapping[str, Any],
    *,
    pixels: tuple[int, int],
    mean: tuple[float, ...],
    std: tuple[float, ...],
) -> QwenVlProcessor:
    size = preprocessor.get("size") or {}
    least, most = size.get("shortest_edge"), size.get("longest_edge")
    return msgspec.convert(
        {
            "type": "qwen_vl",
            "patch_size": vision["patch_size"],
            "merge": vision["spatial_merge_size"],
            "min_pixels": least or preprocessor.get("min_pixels") or pixels[0],
            "max_pixels": most or preprocessor.get("max_pixels") or pixels[1],
            **_common(preprocessor, Image.Resampling.BICUBIC, mean, std),
        },
        QwenVlProcessor,
    )


def _gemma3(config: Mapping[str, Any], vision: Mapping[str, Any], preprocessor: Mapping[str, Any]) -> Gemma3Processor:
    image_size = vision["image_size"]
    size = preprocessor.get("size") or {"height": image_size, "width": image_size}
    if (size.get("height"), size.get("width")) != (image_size, image_size):
        raise ModelFileError(
            f"preprocessor: 'size' is {size}, but the vision tower requires {image_size} x {image_size}"
        )
    return msgspec.convert(
        {
            "type": "gemma3",
            "patch_size": vision["patch_size"],
            "height": image_size,
            "width": image_size,
            "tokens": config.get("mm_tokens_per_image", 256),
            **_common(preprocessor, Image.Resampling.BILINEAR, HALF, HALF),
        },
        Gemma3Processor,
    )


def _gemma4(config: Mapping[str, Any], vision: Mapping[str, Any], preprocessor: Mapping[str, Any]) -> Gemma4Processor:
    neutral = all(value == 0 for value in preprocessor.get("image_mean") or ()) and all(
        value == 1 for value in preprocessor.get("image_std") or ()
    )
    if preprocessor.get("do_normalize") is not False and not neutral:
        mean, std = (str(preprocessor.get(key))[:40] for key in ("image_mean", "image_std"))
        raise UnsupportedModelError(
            f"preprocessor: 'image_mean' is {mean} and 'image_std' is {std}, but Gemma 4 supports only 0 and 1"
        )
    merge = vision["pooling_kernel_size"]
    common = _common(preprocessor, Image.Resampling.BICUBIC, HALF, HALF)
    return msgspec.convert(
        {
            **common,
            "type": "gemma4",
            "patch_size": vision["patch_size"],
            "merge": merge,
            "max_tokens": preprocessor.get("max_soft_tokens", 280),
            "side": min(vision["position_embedding_size"] // merge, 1 << 15),
            "mean": HALF,
            "std": HALF,
        },
        Gemma4Processor,
    )


def _idefics3(
    config: Mapping[str, Any], vision: Mapping[str, Any], preprocessor: Mapping[str, Any]
) -> Idefics3Processor:
    patch_size, scale_factor = vision["patch_size"], config.get("scale_factor", 2)
    tile = (preprocessor.get("max_image_size") or {}).get("longest_edge") or vision["image_size"]
    side = tile // patch_size // scale_factor
    if side * scale_factor * patch_size > tile or side < 1 or tile // patch_size % scale_factor:
        raise ModelFileError(
            f"preprocessor: 'max_image_size' (or the model's 'image_size') is {tile}, expected a multiple of "
            f"{scale_factor * patch_size}"
        )
    split = preprocessor.get("do_image_splitting")
    return msgspec.convert(
        {
            "type": "idefics3",
            "patch_size": patch_size,
            "longest_edge": (preprocessor.get("size") or {}).get("longest_edge") or 4 * tile,
            "tile": tile,
            "tokens_per_tile": side**2,
            "split": True if split is None else split,
            **_common(preprocessor, Image.Resampling.LANCZOS, HALF, HALF),
        },
        Idefics3Processor,
    )


def _pixtral(config: Mapping[str, Any], vision: Mapping[str, Any], preprocessor: Mapping[str, Any]) -> PixtralProcessor:
    longest_edge = (preprocessor.get("size") or {}).get("longest_edge") or vision["image_size"]
    return msgspec.convert(
        {
            "type": "pixtral",
            "patch_size": vision["patch_size"],
            "merge": config.get("spatial_merge_size", 2) if config["model_type"] == "mistral3" else 1,
            "longest_edge": longest_edge,
            **_common(preprocessor, Image.Resampling.BICUBIC, CLIP_MEAN, CLIP_STD),
        },
        PixtralProcessor,
    )


def _muse_glimmer(
    config: Mapping[str, Any], vision: Mapping[str, Any], preprocessor: Mapping[str, Any]
) -> MuseGlimmerProcessor:
    return msgspec.convert(
        {
            "type": "muse_glimmer",
            "patch_size": vision["patch_size"],
            "merge": vision["merge_size"],
            "max_tokens": preprocessor.get("max_image_tokens", 4096),
            **_common(preprocessor, Image.Resampling.LANCZOS, HALF, HALF),
        },
        MuseGlimmerProcessor,
    )


def _common(
    preprocessor: Mapping[str, Any], resample: int, mean: tuple[float, ...], std: tuple[float, ...]
) -> dict[str, Any]:
    """Return the settings that all processors have; the other arguments are defaults."""
    return {
        "resample": preprocessor.get("resample", resample),
        "mean": preprocessor.get("image_mean") or mean,
        "std": preprocessor.get("image_std") or std,
        "factor": preprocessor.get("rescale_factor", 1 / 255),
    }


_Reader = Callable[[Mapping[str, Any], Mapping[str, Any], Mapping[str, Any]], ImageProcessor]
_READERS: dict[str, _Reader] = {
    "qwen3_5": _qwen3,
    "qwen3_5_moe": _qwen3,
    "qwen3_vl": _qwen3,
    "qwen3_vl_moe": _qwen3,
    "qwen2_5_vl": _qwen2_5,
    "gemma3": _gemma3,
    "gemma4": _gemma4,
    "llava": _pixtral,
    "mistral3": _pixtral,
    "muse_glimmer": _muse_glimmer,
    "idefics3": _idefics3,
    "smolvlm": _idefics3,
}
