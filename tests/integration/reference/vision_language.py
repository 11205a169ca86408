"""Tiny vision-language models with random weights: prompts with images for the engine and for transformers."""

from collections.abc import Sequence as Rows
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image
from scheduler_runs import GREEDY, scheduler_of
from torch import Tensor
from transformers import AutoModelForImageTextToText, PreTrainedModel

from helexa.neuron.engine.execution.runner import Runner
from helexa.neuron.engine.execution.step_builder_and_penalties import build_step
from helexa.neuron.engine.ipc.engine_options import EngineOptions
from helexa.neuron.engine.ipc.messages import Generate, PromptImage
from helexa.neuron.engine.loading.load import load_once
from helexa.neuron.engine.loop import Steps
from helexa.neuron.engine.scheduling.sequence import Sequence
from helexa.neuron.vision.decode import ImageLimits
from helexa.neuron.vision.image_tokens_and_errors import ImageRange, expanded_tokens
from helexa.neuron.vision.processor_choice import PreparedImage, image_processor, prepare
from helexa.neuron.weights.vision_config import read_vision_config
from neuron.vision.images import encoded, noise
from reference.vision_models import (
    MODELS,
    PREPROCESSORS,
    gemma4_inputs,
    muse_glimmer_inputs,
    pixels_of,
    tiles_of,
    with_both_steps,
)
from tiny_models import tiny_model

IMAGE_TOKEN, SEPARATOR = 300, 301
_TEXT = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
_LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 500.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [3, 3, 2],
    },
}
_MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "mrope_section": [6, 5, 5]}}
_EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}
TEXTS: dict[str, dict[str, Any]] = {
    "qwen3_5": _LINEAR,
    "qwen3_5_moe": _LINEAR | _EXPERTS,
    "qwen3_vl": _MROPE,
    "qwen2_5_vl": {
        "head_dim": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "mrope_section": [3, 3, 2]},
    },
    "gemma3": {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "gemma4": {
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "global_head_dim": 64,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": 320,
        "use_bidirectional_attention": "vision",
        "final_logit_softcapping": 3.0,
    },
    "llava": {"model_type": "mistral", "sliding_window": None},
    "mistral3": {"model_type": "mistral", "sliding_window": None},
    "muse_glimmer": {"sliding_window": 24},
    "idefics3": {"model_type": "llama"},
    "smolvlm": {"model_type": "llama"},
}

Part = int | Rows[int] | Image.Image
"""A part of a prompt: an image, text tokens, or a number of random text tokens."""


@dataclass(frozen=True)
class Prompt:
    """A prompt with images for the engine."""

    tokens: list[int]
    images: list[PreparedImage]
    ranges: list[ImageRange]

    def sequence(self, number: int = 0, max_tokens: int = 8, **settings: Any) -> Sequence:
        request = Generate(
            id=number,
            prompt=self.tokens,
            max_tokens=max_tokens,
            sampling=GREEDY,
            images=[PromptImage(image.digest, image.layout) for image in self.images],
            image_ranges=self.ranges,
            **settings,
        )
        return Sequence(request, pixels=[image.pixels for image in self.images])


class VisionLanguageModel:
    """A tiny model, in the engine and in transformers."""

    def __init__(
        self, folder: Path, model_type: str, seed: int = 0, *, image_token: int = IMAGE_TOKEN, **options: Any
    ) -> None:
        self._image_token = image_token
        self.model_type = model_type
        self.folder = folder
        settings = MODELS[model_type] | {"text_config": _TEXT | TEXTS[model_type]}
        names = ("image_token_id", "image_token_index")
        settings |= dict.fromkeys(names, image_token) | {"tie_word_embeddings": False}
        self.reference: PreTrainedModel = tiny_model(
            folder, seed, auto=AutoModelForImageTextToText, model_type=model_type, **settings
        ).eval()
        self._options = options
        self.runner = self.load()
        config = read_vision_config(folder)
        assert config is not None
        self.processor = image_processor(config.config, PREPROCESSORS.get(model_type, _preprocessor(model_type)))

    def load(self, **options: Any) -> Runner:
        settings = {"dtype": "float32", "kv_cache_mb": 8, "snapshot_mb": 8, "images": True, "kernels": "torch"}
        return load_once(self.folder, EngineOptions(**settings | self._options | options))

    @cached_property
    def tokenizer(self) -> tokenizers.Tokenizer:
        return tokenizers.Tokenizer.from_file(str(self.folder / "tokenizer.json"))

    def prompt(self, *parts: Part, seed: int = 0, around: Rows[int] = (SEPARATOR, SEPARATOR)) -> Prompt:
        """Return the prompt with the given parts. The tokens `around` surround the images and tiles."""
        generator = np.random.default_rng(seed)
        tokens: list[int] = []
        images: list[PreparedImage] = []
        for part in parts:
            if isinstance(part, int):
                tokens += generator.integers(1, IMAGE_TOKEN, part).tolist()
            elif isinstance(part, Image.Image):
                images.append(self.prepared(part))
                tokens += [around[0], self._image_token] * len(images[-1].layout.ranges) + [around[1]]
            else:
                tokens += part
        expanded, ranges = expanded_tokens(tokens, self._image_token, [image.layout for image in images])
        return Prompt(expanded, images, ranges)

    def prepared(self, image: Image.Image) -> PreparedImage:
        return prepare(encoded(image), self.processor, ImageLimits(), 1 << 20, _array)

    def logits(self, prompt: Prompt, output: Rows[int] = ()) -> Tensor:
        """Return the logits of transformers for a prompt and the tokens after it, [tokens, vocabulary]."""
        tokens = [*prompt.tokens, *output]
        types = torch.zeros(1, len(tokens), dtype=torch.int64)
        for image_range in prompt.ranges:
            types[:, image_range.start : image_range.end] = 1
        inputs: dict[str, Any] = {}
        if prompt.images and self.model_type.startswith("qwen"):
            inputs["pixel_values"] = torch.cat([with_both_steps(image) for image in prompt.images])
            inputs["image_grid_thw"] = torch.tensor([(1, *image.layout.tiles[0]) for image in prompt.images])
            inputs["mm_token_type_ids"] = types.int()
        elif prompt.images and self.model_type == "muse_glimmer":
            inputs["pixel_values"], inputs["image_grid_thw"] = muse_glimmer_inputs(prompt.images)
        elif prompt.images and self.model_type == "gemma4":
            inputs["pixel_values"], inputs["image_position_ids"] = gemma4_inputs(prompt.images)
            inputs["mm_token_type_ids"] = types.int()
        elif prompt.images and self.model_type in ("mistral3", "llava"):
            size = self.reference.config.vision_config.patch_size
            pixels = [pixels_of(image, size, 2 if self.model_type == "mistral3" else 1) for image in prompt.images]
            height, width = (max(image.shape[axis] for image in pixels) for axis in (2, 3))
            padded = [F.pad(image, (0, width - image.shape[3], 0, height - image.shape[2])) for image in pixels]
            inputs["pixel_values"] = torch.cat(padded)
            inputs["image_sizes"] = torch.tensor([image.shape[2:] for image in pixels])
        elif prompt.images:
            size = self.reference.config.vision_config.patch_size
            tiles = torch.cat([tiles_of(image, size) for image in prompt.images])
            inputs["pixel_values"] = tiles if self.model_type == "gemma3" else tiles[None]
            if self.model_type == "gemma3":
                inputs["token_type_ids"] = types
        with torch.inference_mode():
            return self.reference(input_ids=torch.tensor([tokens]), use_cache=False, **inputs).logits[0]


def _preprocessor(model_type: str) -> dict[str, Any]:
    return PREPROCESSORS["qwen3_5"] if model_type.startswith("qwen") else {}


def _array(shape: tuple[int, int]) -> NDArray[np.float32]:
    return np.empty(shape, np.float32)


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    return noise(width, height, seed=seed)


def generate_with_logits(runner: Runner, sequences: Rows[Sequence], **options: Any) -> list[tuple[list[int], Tensor]]:
    """Run all sequences in one batch; return the output tokens of each sequence and their logits [tokens, V]."""
    scheduler = scheduler_of(runner, **{"speculation": False, "prefix_reuse": "off"} | options)
    for sequence in sequences:
        assert scheduler.add(sequence) is None
    logits: dict[int, list[Tensor]] = {sequence.id: [] for sequence in sequences}
    while not scheduler.idle:
        plan = scheduler.plan()
        rows = runner.logits_of(build_step(plan, (), runner.encoder)).float().clone()
        for entry, row in zip((entry for entry in plan if entry.samples), rows, strict=True):
            logits[entry.sequence.id].append(row)
        scheduler.commit(plan, rows.argmax(-1).tolist())
    scheduler.check_idle()
    return [
        (sequence.tokens[len(sequence.request.prompt) :], torch.stack(logits[sequence.id])) for sequence in sequences
    ]


def generate(runner: Runner, sequences: Rows[Sequence], scheduler: Any = None, **options: Any) -> list[list[int]]:
    """Run all sequences in one batch with `Steps`; return the output tokens of each sequence."""
    scheduler = scheduler or scheduler_of(runner, **options)
    for sequence in sequences:
        assert scheduler.add(sequence) is None
    steps = Steps(runner, scheduler)
    while not steps.idle:
        for output in steps.advance():
            assert output.error is None, output.error
    scheduler.check_idle()
    return [sequence.tokens[len(sequence.request.prompt) :] for sequence in sequences]
