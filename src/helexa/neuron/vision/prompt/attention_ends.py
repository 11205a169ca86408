"""The ranges of a prompt that its tokens attend to, if image tokens attend to their whole image."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from helexa.neuron.vision.prompt.image_range import ImageRange


def attention_ends(length: int, ranges: Sequence[ImageRange]) -> NDArray[np.int32]:
    """Return the number of tokens at the beginning of a prompt that each token may attend to, int32 [length].

    A text token attends to itself and to the tokens before it. An image token of Gemma 3 attends to all tokens of its
    image and to the tokens before the image, so a prefill step must contain all tokens of the image. A sliding window
    excludes tokens at the beginning, as in a text, and does not change the number that this function returns.

    Args:
        length: number of tokens of the prompt.
        ranges: image tokens of the prompt.
    """
    ends = np.arange(1, length + 1, dtype=np.int32)
    for image_range in ranges:
        ends[image_range.start : image_range.end] = image_range.end
    return ends
