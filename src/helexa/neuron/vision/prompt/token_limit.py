"""The maximum number of tokens of an image according to a request."""

from helexa.neuron.vision.image_error import ImageError

_LOW = 256  # tokens; 512 x 512 pixels in Qwen3.5
_DETAILS = ("auto", "low", "high", "original")


def token_limit(detail: str, max_image_tokens: int) -> int:
    """Return the maximum number of tokens of an image.

    Args:
        detail: `detail` of OpenAI's API. With "low", an image has at most 256 tokens.
        max_image_tokens: maximum number of tokens according to the model's configuration.

    Raises:
        ImageError: `detail` is not "auto", "low" or "high".
    """
    if detail not in _DETAILS:
        raise ImageError(f"'detail' of an image is '{detail}', supported: {', '.join(_DETAILS)}")
    return min(_LOW, max_image_tokens) if detail == "low" else max_image_tokens
