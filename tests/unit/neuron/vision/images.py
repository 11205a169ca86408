"""Images and image files for tests."""

import io
from typing import Any

import numpy as np
from PIL import Image

SIZES = [(1, 1), (37, 53), (500, 17), (640, 480), (333, 1001), (1600, 1200), (1025, 1024)]
"""Widths and heights: a single pixel, sizes that no patch size divides, narrow and large images."""


def noise(width: int, height: int, mode: str = "RGB", seed: int = 0) -> Image.Image:
    """Return an image with a different value in every pixel, on top of a gradient."""
    generator = np.random.default_rng([seed, width, height])
    channels = len(Image.new(mode, (1, 1)).getbands())
    ramp = np.linspace(0, 128, width * height).reshape(height, width, 1)
    values = (ramp + generator.integers(0, 128, (height, width, channels))).astype(np.uint8)
    return Image.fromarray(values if channels > 1 else values[..., 0], mode)


def encoded(image: Image.Image, file_format: str = "PNG", **options: Any) -> bytes:
    """Return the contents of an image file."""
    file = io.BytesIO()
    image.save(file, file_format, **options)
    return file.getvalue()
