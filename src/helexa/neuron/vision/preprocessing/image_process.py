"""Sandbox process that decodes and resizes images with limits on memory and CPU time. `ImageSandbox` starts it.

Image files are untrusted input for decoders in C. An image that needs too much memory or time, or that crashes a
decoder, ends the sandbox process and not the server.
"""

import os
from functools import partial

import msgspec

from helexa.neuron.processes.sandboxed import cpu_time_limit, receive_descriptor, serve
from helexa.neuron.vision.image_error import ImageError
from helexa.neuron.vision.preprocessing.decode import ImageLimits
from helexa.neuron.vision.preprocessing.image_processor import ImageProcessor, prepare
from helexa.neuron.vision.preprocessing.shared_pixels import pixel_array

MAX_MEMORY = 1536 << 20
"""Maximum growth of the process's address space after its start, in bytes."""


class ImageRequest(msgspec.Struct, frozen=True):
    """The settings of a request. In the request, the settings are one line of JSON, and the image file follows.

    Attributes:
        processor: image processor of the model.
        limits: limits on the image file.
        max_tokens: maximum number of tokens of the image.
        seconds: maximum CPU time in seconds.
    """

    processor: ImageProcessor
    limits: ImageLimits
    max_tokens: int
    seconds: float


class ImageResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The response to a request, as JSON. The pixels are in the shared memory of the request.

    Attributes:
        width: width of the image in pixels, before it was resized.
        height: height of the image in pixels, before it was resized.
        digest: see `PreparedImage.digest`.
        error: reason why the image cannot be used; empty if it can.
    """

    width: int = 0
    height: int = 0
    digest: bytes = b""
    error: str = ""


def main() -> None:
    """Answer requests from standard input, until standard input is closed."""
    serve(_respond, MAX_MEMORY)


def _respond(body: bytes) -> bytes:
    settings, _, data = body.partition(b"\n")
    request = msgspec.json.decode(settings, type=ImageRequest)
    descriptor = receive_descriptor()
    allocate = partial(pixel_array, descriptor)
    try:
        with cpu_time_limit(request.seconds):
            image = prepare(data, request.processor, request.limits, request.max_tokens, allocate)
    except ImageError as error:
        return msgspec.json.encode(ImageResponse(error=str(error)))
    finally:
        os.close(descriptor)
    return msgspec.json.encode(ImageResponse(width=image.width, height=image.height, digest=image.digest))


if __name__ == "__main__":
    main()
