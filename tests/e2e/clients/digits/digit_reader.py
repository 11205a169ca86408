"""A tiny vision-language model that reads handwritten digits, in transformers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from transformers import AutoModelForImageTextToText, PreTrainedModel
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from neuron.vision.images import encoded

MODEL = Path(__file__).parent / "model"
HELD_OUT = Path(__file__).parent / "held_out.npz"
QUESTION = "Which digits?"

Digit = NDArray[np.uint8]
"""A gray image, uint8 [8, 8]."""


def held_out() -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Return images that the training did not use, [N, 8, 8], and their digits [N]."""
    with np.load(HELD_OUT) as file:
        return file["images"], file["digits"]


def png(digit: Digit) -> bytes:
    return encoded(Image.fromarray(digit))


class DigitReader:
    """The model, and the prompts that ask for the digits in some images.

    Args:
        model: the model to use instead of the one in `folder`.
    """

    def __init__(self, folder: Path = MODEL, model: PreTrainedModel | None = None) -> None:
        self.model: PreTrainedModel = model or AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
        self._tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._processor = Qwen2VLImageProcessorPil.from_pretrained(folder)

    def inputs(self, prompts: Sequence[Sequence[Digit]], answers: Sequence[str] | None = None) -> dict[str, Any]:
        """Return the inputs of the model for prompts with equally many images each, and for their answers.

        `labels` contains the tokens of the answers, and -100 at the positions of the prompts.
        """
        pixels = self._processor(
            [Image.fromarray(image) for prompt in prompts for image in prompt], return_tensors="pt"
        )
        size = int(pixels["image_grid_thw"][0].prod()) // self._processor.merge_size**2
        images = f"<|vision_start|>{'<|image_pad|>' * size}<|vision_end|>" * len(prompts[0])
        prompt = self._encode(f"<|im_start|>user\n{images}{QUESTION}<|im_end|>\n<|im_start|>assistant\n")
        rows = (
            [prompt + self._encode(f"{answer}<|im_end|>") for answer in answers] if answers else [prompt] * len(prompts)
        )
        tokens = torch.tensor(rows)
        labels = tokens.clone()
        labels[:, : len(prompt)] = -100
        image_token = self._tokenizer.token_to_id("<|image_pad|>")
        return {"input_ids": tokens, "mm_token_type_ids": (tokens == image_token).int(), "labels": labels, **pixels}

    def answers(self, prompts: Sequence[Sequence[Digit]]) -> list[str]:
        """Return the model's greedy answers."""
        tokens = self.tokens(prompts)
        return [self._tokenizer.decode(row.tolist()) for row in tokens]

    def tokens(self, prompts: Sequence[Sequence[Digit]]) -> Tensor:
        inputs = self.inputs(prompts)
        del inputs["labels"]
        length = inputs["input_ids"].shape[1]
        with torch.inference_mode():
            return self.model.generate(**inputs, max_new_tokens=len(prompts[0]) + 1, do_sample=False)[:, length:]

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text).ids
