"""The image processor of a model, and the placeholders of images in its prompts. Used in the server process."""

import asyncio
import logging
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Protocol, Self

from helexa.core.errors import ModelFileError
from helexa.neuron.vision.image_error import PixelMemoryError
from helexa.neuron.vision.preprocessing.decode import ImageLimits
from helexa.neuron.vision.preprocessing.image_sandbox import ImageSandbox, SharedImage
from helexa.neuron.vision.preprocessing.layout import ImageLayout
from helexa.neuron.vision.preprocessing.settings import image_processor
from helexa.neuron.vision.prompt.image_range import ImageRange, expanded_tokens
from helexa.neuron.vision.prompt.image_text import image_text
from helexa.neuron.vision.prompt.token_limit import token_limit
from helexa.neuron.weights.vision.config import VisionConfig, read_vision_config

log = logging.getLogger(__name__)

MAX_PIXEL_BYTES = 1 << 30
"""Maximum memory for the pixels of all requests of this process that have not ended, in bytes."""

_WORKERS = 2
_SANDBOX = ImageSandbox(ImageLimits())
# The threads wait for the sandbox processes. The default executor must stay free for other work.
_THREADS = ThreadPoolExecutor(_WORKERS, "images")


class Vocabulary(Protocol):
    """The tokenizer of a model."""

    def token_id(self, text: str) -> int | None:
        """Return the id of the token with the given text; None if the vocabulary has no such token."""
        ...


class ModelVision:
    """Prepares images for one model, and inserts their tokens into prompts.

    Args:
        config: configuration of the model's vision part.
        image_token: id of the image token.
        max_image_tokens: maximum number of tokens of an image. Larger images are shrunk.

    Raises:
        ModelFileError: a setting is invalid or not supported.
    """

    def __init__(self, config: VisionConfig, vocabulary: Vocabulary, max_image_tokens: int) -> None:
        self._text = image_text(config.config["model_type"])
        self._processor = image_processor(config.config, config.preprocessor)
        self._max_image_tokens = max_image_tokens
        image_token = vocabulary.token_id(self._text.image_token)
        if image_token is None:
            raise ModelFileError(f"the vocabulary has no token '{self._text.image_token}'")
        self._image_token = image_token

    @classmethod
    def open(cls, path: Path, vocabulary: Vocabulary, max_image_tokens: int, mmproj: Path | None = None) -> Self | None:
        """Read the vision part of the model at `path`.

        Return None if the model has no vision part. Also return None, and log a warning, if helexa does not support it.

        Args:
            mmproj: GGUF file with the vision tower of a GGUF model. None to look for it beside the model.

        Raises:
            ModelFileError: `mmproj` is invalid or not supported.
        """
        try:
            config = read_vision_config(path, mmproj)
            return None if config is None else cls(config, vocabulary, max_image_tokens)
        except ModelFileError as error:
            if mmproj is not None:
                raise
            log.warning("the model reads text only path=%s reason=%s", path, error)
            return None

    async def prepare(self, data: bytes, detail: str = "auto") -> SharedImage:
        """Return the pixels and the digest of the image file with the contents `data`.

        Args:
            detail: see `token_limit`.

        Raises:
            ImageError: the image cannot be used.
            PixelMemoryError: the pixels of running requests need too much memory.
        """
        max_tokens = token_limit(detail, self._max_image_tokens)
        loop = asyncio.get_running_loop()
        image = await loop.run_in_executor(_THREADS, _SANDBOX.prepare, data, self._processor, max_tokens)
        _BUDGET.take(image)
        return image

    def insert(self, prompt: str, layouts: Sequence[ImageLayout]) -> str:
        """Replace each placeholder that the chat template has written in `prompt` (see `ImageText.expanded`)."""
        return self._text.expanded(prompt, layouts)

    def expanded(self, tokens: Sequence[int], layouts: Sequence[ImageLayout]) -> tuple[list[int], list[ImageRange]]:
        """Repeat each image token as often as its tile has embeddings (see `expanded_tokens`)."""
        return expanded_tokens(tokens, self._image_token, layouts)


class _Budget:
    """Limits the memory for pixels in this process."""

    def __init__(self) -> None:
        self._used = 0
        self._lock = Lock()

    def take(self, image: SharedImage) -> None:
        """Count the pixels of an image until their memory is freed."""
        size = image.pixels.nbytes
        with self._lock:
            if self._used + size > MAX_PIXEL_BYTES:
                raise PixelMemoryError(f"the images of all requests need more than {MAX_PIXEL_BYTES >> 20} MiB")
            self._used += size
        weakref.finalize(image.pixels, self._release, size)

    def _release(self, size: int) -> None:
        with self._lock:
            self._used -= size


_BUDGET = _Budget()
