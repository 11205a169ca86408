"""Tiny multimodal models with random weights, and the outputs of their vision towers in transformers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoModelForImageTextToText, PreTrainedModel

from helexa.neuron.layers.loader import Loader
from helexa.neuron.models.vision import tower_class
from helexa.neuron.models.vision.tower import ImageFeatures, VisionTower
from helexa.neuron.ops.interface import Ops
from helexa.neuron.ops.reference.reference_ops import ReferenceOps
from helexa.neuron.vision.decode import ImageLimits
from helexa.neuron.vision.processor_choice import PreparedImage, image_processor, prepare
from helexa.neuron.weights.quantization_formats import QuantPolicy
from helexa.neuron.weights.vision_checkpoint import VisionCheckpoint, open_vision_checkpoint
from neuron.ops.paging import CPU
from neuron.vision.images import encoded, noise
from tiny_models import tiny_model

_TEXT = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 64,
}
_QWEN3 = {
    "depth": 3,
    "hidden_size": 96,
    "intermediate_size": 84,
    "num_heads": 4,
    "out_hidden_size": 64,
    "num_position_embeddings": 49,
}
_SIGLIP = {
    "hidden_size": 96,
    "intermediate_size": 84,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vision_use_head": False,
}
_PIXTRAL = {
    "model_type": "pixtral",
    "hidden_size": 96,
    "intermediate_size": 84,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 140,
    "patch_size": 14,
    "hidden_act": "silu",
}
_MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}}

MODELS: dict[str, dict[str, Any]] = {
    "qwen3_5": {"vision_config": _QWEN3, "text_config": _TEXT},
    "qwen3_5_moe": {"vision_config": _QWEN3, "text_config": _TEXT},
    "qwen3_vl": {
        "vision_config": {**_QWEN3, "deepstack_visual_indexes": [0, 2]},
        "text_config": {**_TEXT, **_MROPE, "num_hidden_layers": 3},
    },
    "qwen2_5_vl": {
        "vision_config": {
            "depth": 3,
            "hidden_size": 160,
            "intermediate_size": 84,
            "num_heads": 2,
            "out_hidden_size": 64,
            "fullatt_block_indexes": [1],
            "window_size": 112,
        },
        "text_config": {**_TEXT, **_MROPE},
    },
    "gemma3": {
        "vision_config": {**_SIGLIP, "image_size": 112, "patch_size": 14},
        "text_config": _TEXT,
        "mm_tokens_per_image": 16,
    },
    "gemma4": {
        "vision_config": {
            "hidden_size": 96,
            "intermediate_size": 84,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "head_dim": 24,
            "patch_size": 16,
            "position_embedding_size": 80,
            "standardize": True,
            "use_clipped_linears": True,
            "rms_norm_eps": 1e-3,
        },
        "text_config": {**_TEXT, "hidden_size_per_layer_input": 0},
        "audio_config": None,
    },
    "mistral3": {"vision_config": _PIXTRAL, "text_config": {**_TEXT, "model_type": "mistral"}},
    "llava": {
        "vision_config": _PIXTRAL,
        "text_config": {**_TEXT, "model_type": "mistral"},
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
    },
    "muse_glimmer": {
        "vision_config": {
            "hidden_size": 96,
            "intermediate_size": 84,
            "num_hidden_layers": 5,
            "num_attention_heads": 4,
            "patch_size": 14,
            "pos_emb_height": 6,
            "pos_emb_width": 6,
            "rope_parameters": {"rope_type": "axial", "rope_theta": 10000.0},
        },
        "text_config": _TEXT,
        "out_hidden_size": 384,
        "projector_hidden_size": 48,
    },
    "idefics3": {"vision_config": {**_SIGLIP, "image_size": 112, "patch_size": 14}, "text_config": _TEXT},
    "smolvlm": {
        "vision_config": {**_SIGLIP, "image_size": 96, "patch_size": 16},
        "text_config": _TEXT,
        "scale_factor": 3,
    },
}
"""Heads of 24 and of 80 numbers, intermediate sizes that no kernel width divides, and tables that must be resized."""

_SPLITTING = {"size": {"longest_edge": 224}, "max_image_size": {"longest_edge": 112}}
PREPROCESSORS = {
    "qwen3_5": {"size": {"shortest_edge": 4096, "longest_edge": 65536}},
    "gemma4": {"max_soft_tokens": 40, "do_normalize": False},
    "llava": {"size": {"longest_edge": 140}},
    "mistral3": {"size": {"longest_edge": 140}},
    "muse_glimmer": {"max_image_tokens": 40},
    "idefics3": _SPLITTING,
    "smolvlm": {"size": {"longest_edge": 192}, "max_image_size": {"longest_edge": 96}},
}
"""Settings of image processors with few patches per image."""

SIZES = [(64, 64), (200, 120), (33, 250), (300, 300)]


def save_model(folder: Path, model_type: str, **vision: Any) -> PreTrainedModel:
    """Write a tiny model, with the settings `vision` of its tower, to `folder`, and return it."""
    settings = MODELS[model_type] | {"vision_config": MODELS[model_type]["vision_config"] | vision}
    return tiny_model(folder, auto=AutoModelForImageTextToText, model_type=model_type, **settings).eval()


def open_tower(
    folder: Path, ops: Ops | None = None, mmproj: Path | None = None, policy: QuantPolicy | None = None
) -> tuple[VisionTower, VisionCheckpoint]:
    """Return the vision tower of the model in `folder`, by default in float32 with plain torch."""
    checkpoint = open_vision_checkpoint(folder, mmproj)
    assert checkpoint is not None
    with checkpoint:
        loader = Loader(checkpoint, ops or ReferenceOps(CPU, torch.float32), lambda done: None, policy=policy)
        return tower_class(checkpoint.config["model_type"])(checkpoint.config, loader), checkpoint


def prepared_images(checkpoint: VisionCheckpoint, sizes: Sequence[tuple[int, int]] = SIZES) -> list[PreparedImage]:
    settings = checkpoint.preprocessor or PREPROCESSORS.get(checkpoint.config["model_type"], PREPROCESSORS["qwen3_5"])
    if checkpoint.config["model_type"] == "gemma4":
        settings = {"max_soft_tokens": 70, **checkpoint.preprocessor}
    if checkpoint.config["model_type"] == "gemma3":
        settings = checkpoint.preprocessor
    processor = image_processor(checkpoint.config, settings)
    files = [encoded(noise(*size, seed=seed)) for seed, size in enumerate(sizes)]
    return [prepare(file, processor, ImageLimits(), 1 << 20, _array) for file in files]


def _array(shape: tuple[int, int]) -> NDArray[np.float32]:
    return np.empty(shape, np.float32)


def encode(tower: VisionTower, image: PreparedImage) -> ImageFeatures:
    with torch.inference_mode():
        return tower.encode(torch.from_numpy(image.pixels), image.layout)


def expected_features(model: PreTrainedModel, images: Sequence[PreparedImage]) -> list[ImageFeatures]:
    """Return the features that transformers computes for all images in one batch."""
    model_type = model.config.model_type
    with torch.inference_mode():
        if model_type == "muse_glimmer":
            features = [model.model.get_image_features(*muse_glimmer_inputs([image])).pooler_output for image in images]
            return [ImageFeatures(embeddings) for (embeddings,) in features]
        if model_type.startswith("qwen"):
            pixels = torch.cat([with_both_steps(image) for image in images])
            grids = torch.tensor([(1, *image.layout.tiles[0]) for image in images])
            output = model.model.get_image_features(pixels, image_grid_thw=grids, return_dict=True)
            deepstack = getattr(output, "deepstack_features", None) or []
            return [
                ImageFeatures(embeddings, tuple(layer[number] for layer in deepstack))
                for number, embeddings in enumerate(output.pooler_output)
            ]
        size = model.config.vision_config.patch_size
        if model_type == "gemma4":
            return [
                ImageFeatures(
                    model.model.get_image_features(*gemma4_inputs([image]), return_dict=True).pooler_output[0]
                )
                for image in images
            ]
        if model_type in ("mistral3", "llava"):
            pixels = [pixels_of(image, size, 2 if model_type == "mistral3" else 1) for image in images]
            outputs = [
                model.model.get_image_features(image, image_sizes=[image.shape[2:]], return_dict=True)
                for image in pixels
            ]
            return [ImageFeatures(output.pooler_output[0]) for output in outputs]
        if model_type == "gemma3":
            output = model.model.get_image_features(
                torch.cat([tiles_of(image, size) for image in images]), return_dict=True
            )
            return [ImageFeatures(embeddings) for embeddings in output.pooler_output]
        outputs = [model.model.get_image_features(tiles_of(image, size)[None], return_dict=True) for image in images]
        return [ImageFeatures(torch.cat([*output.pooler_output])) for output in outputs]


def with_both_steps(image: PreparedImage) -> Tensor:
    patches = torch.from_numpy(image.pixels).unflatten(1, (3, 1, -1))
    return patches.expand(-1, -1, 2, -1).flatten(1)


def muse_glimmer_inputs(images: Sequence[PreparedImage]) -> tuple[Tensor, Tensor]:
    """Return the inputs of images: patches in the order of rows, [patches, values], and their grids."""
    patches = []
    for image in images:
        rows, columns = image.layout.tiles[0]
        pixels = pixels_of(image, 14, 2).view(3, rows, 14, columns, 14).permute(1, 3, 0, 2, 4)
        patches.append(pixels.reshape(rows * columns, 1, -1).expand(-1, 2, -1).flatten(1))
    return torch.cat(patches), torch.tensor([(1, *image.layout.tiles[0]) for image in images])


def gemma4_inputs(images: Sequence[PreparedImage]) -> tuple[Tensor, Tensor]:
    """Return the inputs of images: patches in the order of rows, [images, patches, values], and their positions."""
    most = max(len(image.pixels) for image in images)
    most += -most % 9
    values, positions = [], []
    for image in images:
        rows, columns = image.layout.tiles[0]
        pixels = pixels_of(image, 16, 3)[0] / 2 + 0.5  # the tower of transformers normalizes
        patches = pixels.view(3, rows, 16, columns, 16).permute(1, 3, 2, 4, 0).flatten(2).flatten(0, 1)
        places = torch.stack(torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij"), -1)
        missing = most - len(patches)
        values.append(F.pad(patches, (0, 0, 0, missing)))
        positions.append(F.pad(places.flip(-1).flatten(0, 1), (0, 0, 0, missing), value=-1))
    return torch.stack(values), torch.stack(positions)


def pixels_of(image: PreparedImage, size: int, merge: int) -> Tensor:
    """Return an image whose patches are in the order of blocks as pixels, [1, 3, height, width]."""
    rows, columns = image.layout.tiles[0]
    patches = torch.from_numpy(image.pixels).view(rows // merge, columns // merge, merge, merge, 3, size, size)
    return patches.permute(4, 0, 2, 5, 1, 3, 6).reshape(1, 3, rows * size, columns * size)


def tiles_of(image: PreparedImage, size: int) -> Tensor:
    """Return the tiles of an image as pixels, [tiles, 3, height, width]."""
    rows, columns = image.layout.tiles[0]
    patches = torch.from_numpy(image.pixels).view(-1, rows, columns, 3, size, size)
    return patches.permute(0, 3, 1, 4, 2, 5).reshape(-1, 3, rows * size, columns * size)
