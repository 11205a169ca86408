"""Read the settings of a model's image processor from the configuration of its checkpoint."""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from PIL import Image

from helexa.core.errors import ModelFileError
from helexa.neuron.vision.preprocessing.gemma3 import Gemma3Processor
from helexa.neuron.vision.preprocessing.idefics3 import Idefics3Processor
from helexa.neuron.vision.preprocessing.image_processor import ImageProcessor
from helexa.neuron.vision.preprocessing.pixels import CLIP_MEAN, CLIP_STD, HALF
from helexa.neuron.vision.preprocessing.qwen_vl import QwenVlProcessor

_REQUIRED = ("do_resize", "do_rescale", "do_normalize")
_UNSUPPORTED = ("do_pan_and_scan", "do_center_crop")


def image_processor(config: Mapping[str, Any], preprocessor: Mapping[str, Any]) -> ImageProcessor:
    """Return the image processor of a model.

    Args:
        config: configuration of the model with the keys of `config.json`. `vision_config` has all settings that the
            configuration class of transformers has.
        preprocessor: settings with the keys of `preprocessor_config.json`. For missing settings, the function uses the
            values that the publishers of the architecture ship.

    Raises:
        ModelFileError: a setting is invalid or not supported, or the architecture has no image processor here.
    """
    model_type = config.get("model_type")
    if model_type not in _READERS:
        raise ModelFileError(f"unsupported vision architecture '{model_type}'; supported: {', '.join(_READERS)}")
    for key in _REQUIRED:
        if preprocessor.get(key) is False:
            raise ModelFileError(f"preprocessor: '{key}' is False, supported: True")
    for key in _UNSUPPORTED:
        if preprocessor.get(key):
            raise ModelFileError(f"preprocessor: '{key}' is {preprocessor[key]!r}, supported: False")
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


def _idefics3(
    config: Mapping[str, Any], vision: Mapping[str, Any], preprocessor: Mapping[str, Any]
) -> Idefics3Processor:
    patch_size, scale_factor = vision["patch_size"], config.get("scale_factor", 2)
    tile = (preprocessor.get("max_image_size") or {}).get("longest_edge") or vision["image_size"]
    side = tile // patch_size // scale_factor
    if side * scale_factor * patch_size > tile or side < 1 or tile // patch_size % scale_factor:
        raise ModelFileError(
            f"preprocessor: tiles of {tile} pixels do not divide into {scale_factor} x {scale_factor} patches of "
            f"{patch_size} pixels"
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


def _common(
    preprocessor: Mapping[str, Any], resample: int, mean: tuple[float, ...], std: tuple[float, ...]
) -> dict[str, Any]:
    """Return the settings that all architectures have. The arguments are the defaults."""
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
    "idefics3": _idefics3,
    "smolvlm": _idefics3,
}
