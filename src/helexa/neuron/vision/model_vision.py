"""Prepare images in sandbox processes, and put their tokens into prompts."""

import asyncio
import logging
import os
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Self

import msgspec

from helexa.core.errors import ModelFileError, UnsupportedModelError
from helexa.core.logs import quoted
from helexa.neuron.processes.sandbox import ProcessPool, Sandbox, SandboxError
from helexa.neuron.vision.decode import ImageLimits, check_bytes
from helexa.neuron.vision.image_process import ImageRequest, ImageResponse
from helexa.neuron.vision.image_tokens_and_errors import (
    MAX_PATCHES,
    ImageError,
    ImageLayout,
    ImageRange,
    PixelMemoryError,
    expanded_tokens,
)
from helexa.neuron.vision.processor_choice import ImageProcessor, image_layout, image_processor
from helexa.neuron.vision.shared_pixels import SharedPixels
from helexa.neuron.weights.vision_config import VisionConfig, read_vision_config

MAX_SECONDS = 15.0  # maximum CPU time for one image, in seconds

_MODULE = "helexa.neuron.vision.image_process"
_PROCESSES = 2
_FLOAT_BYTES = 4

_LOW = 256  # maximum tokens of an image with the detail `low`; in Qwen3.5, 512 x 512 pixels become 256 tokens
_DETAILS = ("auto", "low", "high", "original")

log = logging.getLogger(__name__)

MAX_PIXEL_BYTES = 1 << 30  # maximum memory for the pixels of all running requests of this process, in bytes

_WORKERS = 2
# The threads wait for the sandbox processes. The default executor must stay free for other work.
_THREADS = ThreadPoolExecutor(_WORKERS, "images")

TokenId = Callable[[str], int | None]  # Returns the id of the token with a text, or None: `Tokenizer.token_id`


@dataclass(frozen=True)
class SharedImage:
    """An image that `ModelVision` prepared: the tower's input, in shared memory."""

    layout: ImageLayout
    # The normalized patches (see `PreparedImage.pixels`). Their memory is freed when `pixels` is closed or deleted.
    pixels: SharedPixels
    digest: bytes  # see `PreparedImage.digest`


class ImageSandbox:
    """Decodes and resizes images in up to two sandbox processes. Thread-safe."""

    def __init__(self, limits: ImageLimits) -> None:
        self._limits = limits
        self._pool = ProcessPool(_MODULE, _PROCESSES)
        self._sandbox = Sandbox(self._pool, _PROCESSES)

    def prepare(self, data: bytes, processor: ImageProcessor, max_tokens: int) -> SharedImage:
        """Return the patches and the digest of the image file with the contents `data`.

        For `max_tokens`, see `processor_choice.prepare`.

        Raises:
            ImageError: the image cannot be used, or it needs too much memory or time; the message gives the reason.
        """
        check_bytes(data, self._limits)
        request = ImageRequest(processor, self._limits, max_tokens, MAX_SECONDS)
        memory = SharedPixels.create(MAX_PATCHES * processor.patch_values * _FLOAT_BYTES)
        try:
            response = self._request(msgspec.json.encode(request) + b"\n" + data, memory)
            # The layout is computed here, too, so that a response cannot claim more pixels than the memory has.
            layout = image_layout(processor, response.width, response.height, max_tokens)
        except BaseException:
            os.close(memory)
            raise
        return SharedImage(layout, SharedPixels(memory, (layout.patches, processor.patch_values)), response.digest)

    def close(self) -> None:
        """End all idle sandbox processes. A process that works on an image continues."""
        self._pool.close()

    def _request(self, body: bytes, memory: int) -> ImageResponse:
        try:
            response = msgspec.json.decode(self._sandbox.request(body, memory), type=ImageResponse)
        except SandboxError as error:
            raise ImageError(f"the image cannot be decoded: {error}; send another image, or try again") from error
        if response.error:
            raise ImageError(response.error)
        return response


@dataclass(frozen=True)
class ImageText:
    """How the prompts of a model contain images."""

    placeholder: str  # text that the chat template writes for each image
    image_token: str  # text of the token whose embedding is replaced with an embedding of the vision tower
    # returns the text for a placeholder, with one image token per range (see `ImageLayout.ranges`)
    replacement: Callable[[ImageLayout], str]

    def expanded(self, prompt: str, layouts: Sequence[ImageLayout]) -> str:
        """Replace each placeholder in `prompt`, which the chat template rendered.

        Raises:
            ImageError: the number of placeholders is not the number of images, because the text of a message contains
                the placeholder, or because the chat template does not support images.
        """
        first, *rest = prompt.split(self.placeholder)
        if len(rest) > len(layouts):
            raise ImageError(
                f"the text of a message contains '{self.placeholder}', which is reserved for images; remove this text"
            )
        if len(rest) < len(layouts):
            raise ImageError(
                f"the model's chat template inserts {len(rest)} of {len(layouts)} images; "
                "send images only in user messages, or choose another model"
            )
        texts = [self.replacement(layout) + after for layout, after in zip(layouts, rest, strict=True)]
        return first + "".join(texts)


def image_text(model_type: str) -> ImageText:
    """Return how the prompts of models with this `model_type` contain images.

    Raises:
        UnsupportedModelError: images of this model type are not supported.
    """
    if model_type not in _TEXTS:
        raise UnsupportedModelError(f"unsupported vision architecture '{model_type}'; supported: {', '.join(_TEXTS)}")
    return _TEXTS[model_type]


def _tiles(layout: ImageLayout) -> str:
    """Return the text of an image of Idefics3: tiles row by row, then the whole image."""
    rows = [
        "".join(f"{_AROUND}<row_{row}_col_{column}><image>" for column in range(1, layout.split.columns + 1)) + "\n"
        for row in range(1, layout.split.rows + 1)
    ]
    separator = "\n" if rows else ""
    return f"{''.join(rows)}{separator}{_AROUND}<global-img><image>{_AROUND}"


def _rows(layout: ImageLayout) -> str:
    """Return Pixtral's text for an image: one `[IMG]` and one mark per row of tokens."""
    return "[IMG][IMG_BREAK]" * (layout.rows - 1) + "[IMG][IMG_END]"


_AROUND = "<fake_token_around_image>"
_QWEN = ImageText("<|image_pad|>", "<|image_pad|>", lambda layout: "<|image_pad|>")
_PIXTRAL = ImageText("[IMG]", "[IMG]", _rows)
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
    "gemma4": ImageText("<|image|>", "<|image|>", lambda layout: "<|image><|image|><image|>"),
    "llava": _PIXTRAL,
    "mistral3": _PIXTRAL,
    "muse_glimmer": ImageText("<|patch|>", "<|patch|>", lambda layout: "<|image_start|><|patch|><|image_end|>"),
    "idefics3": _IDEFICS3,
    "smolvlm": _IDEFICS3,
}


def token_limit(detail: str, max_image_tokens: int) -> int:
    """Return the maximum number of tokens of an image with OpenAI's setting `detail`.

    Raises:
        ImageError: the value of `detail` is not supported.
    """
    if detail not in _DETAILS:
        raise ImageError(f"'detail' of an image is '{detail}', supported: {', '.join(_DETAILS)}")
    return min(_LOW, max_image_tokens) if detail == "low" else max_image_tokens


_SANDBOX = ImageSandbox(ImageLimits())


class ModelVision:
    """Prepares images for one model, and inserts their tokens into prompts.

    Raises:
        ModelFileError: a setting is invalid or not supported.
    """

    def __init__(self, config: VisionConfig, token_id: TokenId, max_image_tokens: int) -> None:
        self._text = image_text(config.config["model_type"])
        self._processor = image_processor(config.config, config.preprocessor)
        self._max_image_tokens = max_image_tokens
        image_token = token_id(self._text.image_token)
        if image_token is None:
            raise ModelFileError(f"the vocabulary has no token '{self._text.image_token}', which images need")
        self._image_token = image_token

    @classmethod
    def open(cls, path: Path, token_id: TokenId, max_image_tokens: int, mmproj: Path | None = None) -> Self | None:
        """Return the vision part of the model at `path`; None if the model has none.

        If helexa does not support the vision part, log a warning and return None.

        Args:
            mmproj: GGUF file with the vision tower of a GGUF model. None to look for it beside the model.

        Raises:
            ModelFileError: `mmproj` is invalid or not supported.
        """
        try:
            config = read_vision_config(path, mmproj)
            return None if config is None else cls(config, token_id, max_image_tokens)
        except ModelFileError as error:
            if mmproj is not None:
                raise
            fields = (quoted(path), quoted(error))
            log.warning("model reads text only path=%s error=%s; requests with images are rejected", *fields)
            return None

    async def prepare(self, data: bytes, detail: str = "auto") -> SharedImage:
        """Return the pixels and the digest of the image file with the contents `data`.

        For `detail`, see `token_limit`. The pixels use shared memory until the result is deleted.

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
        """Replace each placeholder in `prompt` (see `ImageText.expanded`)."""
        return self._text.expanded(prompt, layouts)

    def expanded(self, tokens: Sequence[int], layouts: Sequence[ImageLayout]) -> tuple[list[int], list[ImageRange]]:
        """Repeat each image token for the embeddings of its range (see `expanded_tokens`)."""
        return expanded_tokens(tokens, self._image_token, layouts)


class _Budget:
    """Limits the memory for pixels in this process."""

    def __init__(self) -> None:
        self._used = 0
        self._lock = Lock()

    def take(self, image: SharedImage) -> None:
        """Count the memory of an image's pixels as used until `image.pixels` is deleted.

        Raises:
            PixelMemoryError: the used memory would exceed `MAX_PIXEL_BYTES`.
        """
        size = image.pixels.nbytes
        with self._lock:
            if self._used + size > MAX_PIXEL_BYTES:
                raise PixelMemoryError(
                    f"the images of all running requests need more than {MAX_PIXEL_BYTES >> 20} MiB; try again later"
                )
            self._used += size
        weakref.finalize(image.pixels, self._release, size)

    def _release(self, size: int) -> None:
        with self._lock:
            self._used -= size


_BUDGET = _Budget()
