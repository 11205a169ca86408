"""Requests with images for a scheduler without a model."""

from typing import Any

from helexa.neuron.engine.ipc.messages import Generate, PromptImage, SamplingParams
from helexa.neuron.vision.image_tokens_and_errors import Grid, ImageLayout, expanded_tokens

IMAGE_TOKEN = 99_999


def image(number: int, tokens: int) -> PromptImage:
    """Return image number `number`, which has `tokens` image tokens."""
    return PromptImage(number.to_bytes(32), ImageLayout(((8, 8),), (Grid(1, tokens),), tokens))


def image_request(number: int, parts: list[PromptImage | list[int]], **settings: Any) -> Generate:
    """Return a request whose prompt has the given images and texts, in this order."""
    images = [part for part in parts if isinstance(part, PromptImage)]
    tokens: list[int] = []
    for part in parts:
        tokens += [IMAGE_TOKEN] if isinstance(part, PromptImage) else part
    prompt, ranges = expanded_tokens(tokens, IMAGE_TOKEN, [one.layout for one in images])
    defaults = {"max_tokens": 2, "sampling": SamplingParams(temperature=0)}
    return Generate(id=number, prompt=prompt, images=images, image_ranges=ranges, **defaults | settings)
