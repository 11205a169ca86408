"""The ranges of a prompt that its tokens attend to, if image tokens attend to their whole image."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from helexa.neuron.vision.prompt.image_span import ImageSpan


def attention_ends(length: int, spans: Sequence[ImageSpan]) -> NDArray[np.int32]:
    """Return the number of tokens at the beginning of a prompt that each token may attend to, int32 [length].

    A text token attends to itself and the tokens before it. An image token of Gemma 3 also attends to the rest of its
    span. A layer with a sliding window excludes the tokens before the window, as in a text; the window does not move
    the end. Therefore a prefill step must contain whole spans.

    Args:
        length: number of tokens of the prompt.
        spans: the prompt's image tokens.
    """
    ends = np.arange(1, length + 1, dtype=np.int32)
    for span in spans:
        ends[span.start : span.end] = span.end
    return ends
