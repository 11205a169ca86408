"""The errors of images that cannot be used."""

from helexa.core.errors import HelexaError


class ImageError(HelexaError):
    """An image of a request cannot be used. The error message is one line for the client."""


class PixelMemoryError(ImageError):
    """The pixels of all running requests need too much memory. A later request may succeed."""
