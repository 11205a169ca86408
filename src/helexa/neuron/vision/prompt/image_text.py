"""The text that replaces the placeholders of images in a prompt."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from helexa.core.errors import ModelFileError
from helexa.neuron.vision.image_error import ImageError
from helexa.neuron.vision.preprocessing.layout import ImageLayout


@dataclass(frozen=True)
class ImageText:
    """The way in which the prompts of a model contain images.

    Attributes:
        placeholder: text that the chat template writes for each image.
        image_token: text of the token whose embedding is replaced with an embedding of the vision tower.
        replacement: function that returns the text to replace a placeholder with. The text contains one image token
            per tile (see `expanded_tokens`).
    """

    placeholder: str
    image_token: str
    replacement: Callable[[ImageLayout], str]

    def expanded(self, prompt: str, layouts: Sequence[ImageLayout]) -> str:
        """Replace each placeholder in `prompt`.

        Args:
            prompt: text that the chat template rendered.
            layouts: layout of each image, in the order of the placeholders.

        Raises:
            ImageError: the number of placeholders is not the number of images, because the text of a message contains
                the placeholder, or because the chat template does not support images.
        """
        first, *rest = prompt.split(self.placeholder)
        if len(rest) > len(layouts):
            raise ImageError(f"the text of a message contains '{self.placeholder}', which is reserved for images")
        if len(rest) < len(layouts):
            raise ImageError(
                f"the model's chat template inserts {len(rest)} of {len(layouts)} images; "
                "it may support images only in user messages, or not at all"
            )
        texts = [self.replacement(layout) + after for layout, after in zip(layouts, rest, strict=True)]
        return first + "".join(texts)


def image_text(model_type: str) -> ImageText:
    """Return the way in which the prompts of models with this `model_type` contain images.

    Raises:
        ModelFileError: images of this model type are not supported.
    """
    if model_type not in _TEXTS:
        raise ModelFileError(f"unsupported vision architecture '{model_type}'; supported: {', '.join(_TEXTS)}")
    return _TEXTS[model_type]


def _tiles(layout: ImageLayout) -> str:
    """Return the text of an image of Idefics3: its tiles row by row, then the whole image."""
    rows = [
        "".join(f"{_AROUND}<row_{row}_col_{column}><image>" for column in range(1, layout.split.columns + 1)) + "\n"
        for row in range(1, layout.split.rows + 1)
    ]
    separator = "\n" if rows else ""
    return f"{''.join(rows)}{separator}{_AROUND}<global-img><image>{_AROUND}"


_AROUND = "<fake_token_around_image>"
_QWEN = ImageText("<|image_pad|>", "<|image_pad|>", lambda layout: "<|image_pad|>")
_IDEFICS3 = ImageText("<image>", "<image>", _tiles)
_TEXTS = {
    "qwen3_5": _QWEN,
    "qwen3_5_moe": _QWEN,
    "qwen3_vl": _QWEN,
    "qwen3_vl_moe": _QWEN,
    "qwen2_5_vl": _QWEN,
    "gemma3": ImageText(
        "<start_of_image>",
        "<image_soft_token>",
        lambda layout: "\n\n<start_of_image><image_soft_token><end_of_image>\n\n",
    ),
    "idefics3": _IDEFICS3,
    "smolvlm": _IDEFICS3,
}
