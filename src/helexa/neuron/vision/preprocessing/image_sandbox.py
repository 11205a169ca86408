"""Prepare images in sandbox processes, with the pixels in shared memory."""

import os
from dataclasses import dataclass

import msgspec

from helexa.neuron.processes.sandbox import Sandbox, SandboxError
from helexa.neuron.vision.image_error import ImageError
from helexa.neuron.vision.preprocessing.decode import ImageLimits, check_bytes
from helexa.neuron.vision.preprocessing.image_process import ImageRequest, ImageResponse
from helexa.neuron.vision.preprocessing.image_processor import ImageProcessor, image_layout
from helexa.neuron.vision.preprocessing.layout import MAX_PATCHES, ImageLayout
from helexa.neuron.vision.preprocessing.shared_pixels import SharedPixels

MAX_SECONDS = 15.0
"""Maximum CPU time for one image, in seconds."""

_MODULE = "helexa.neuron.vision.preprocessing.image_process"
_PROCESSES = 2
_FLOAT_BYTES = 4


@dataclass(frozen=True)
class SharedImage:
    """The input of the vision tower for one image, with the pixels in shared memory.

    Attributes:
        layout: tiles and patches of the image, and number of its tokens.
        pixels: the normalized patches (see `PreparedImage.pixels`). The owner of this object closes `pixels`.
        digest: see `PreparedImage.digest`.
    """

    layout: ImageLayout
    pixels: SharedPixels
    digest: bytes


class ImageSandbox:
    """Decodes and resizes images in up to two sandbox processes, which are started when they are needed. Thread-safe.

    Args:
        limits: limits on image files.
    """

    def __init__(self, limits: ImageLimits) -> None:
        self._limits = limits
        self._sandbox = Sandbox(_MODULE, _PROCESSES)

    def prepare(self, data: bytes, processor: ImageProcessor, max_tokens: int) -> SharedImage:
        """Return the patches and the digest of the image file with the contents `data`.

        Args:
            processor: image processor of the model.
            max_tokens: maximum number of tokens of the image (see `image_processor.prepare`).

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
        self._sandbox.close()

    def _request(self, body: bytes, memory: int) -> ImageResponse:
        try:
            response = msgspec.json.decode(self._sandbox.request(body, memory), type=ImageResponse)
        except SandboxError as error:
            raise ImageError(f"the image cannot be decoded: {error}") from error
        if response.error:
            raise ImageError(response.error)
        return response
