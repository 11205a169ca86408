"""Sandbox process that decodes and resizes images. `ImageSandbox` starts it.

Image files are untrusted input for decoders in C. An image that needs too much memory or time, or that crashes a
decoder, ends the sandbox process and not the server.
"""

import os
from functools import partial

import msgspec

from helexa.neuron.processes.inside_sandbox import cpu_time_limit, receive_descriptor, serve
from helexa.neuron.vision.decode import ImageLimits, pixel_share
from helexa.neuron.vision.image_tokens_and_errors import ImageError
from helexa.neuron.vision.processor_choice import ImageProcessor, prepare
from helexa.neuron.vision.shared_pixels import pixel_array

MAX_MEMORY = 1536 << 20  # maximum growth of the process's address space after its start, in bytes

_LEAST_SHARE = 0.2  # share of the maximum CPU time that even a tiny image gets


class ImageRequest(msgspec.Struct, frozen=True):
    """A request to the image process: one line of JSON; the image file follows."""

    processor: ImageProcessor
    limits: ImageLimits
    max_tokens: int
    # Maximum CPU time in seconds for an image with the maximum number of pixels. Smaller images get less.
    seconds: float


class ImageResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The image process's response as JSON. The pixels are in shared memory."""

    # size of the image in pixels, before it was resized
    width: int = 0
    height: int = 0
    digest: bytes = b""  # see `PreparedImage.digest`
    error: str = ""  # reason why the image cannot be used; empty if it can


def main() -> None:
    """Answer requests in the image process until standard input is closed."""
    serve(_respond, MAX_MEMORY)


def _respond(body: bytes) -> bytes:
    settings, _, data = body.partition(b"\n")
    request = msgspec.json.decode(settings, type=ImageRequest)
    descriptor = receive_descriptor()
    allocate = partial(pixel_array, descriptor)
    try:
        with cpu_time_limit(request.seconds * (_LEAST_SHARE + (1 - _LEAST_SHARE) * pixel_share(data, request.limits))):
            image = prepare(data, request.processor, request.limits, request.max_tokens, allocate)
    except ImageError as error:
        return msgspec.json.encode(ImageResponse(error=str(error)))
    finally:
        os.close(descriptor)
    return msgspec.json.encode(ImageResponse(width=image.width, height=image.height, digest=image.digest))


if __name__ == "__main__":
    main()
