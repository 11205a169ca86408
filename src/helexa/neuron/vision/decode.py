"""Decode image files, which are untrusted input, to RGB pixels."""

import warnings
from io import BytesIO

import msgspec
from PIL import Image, UnidentifiedImageError

from helexa.neuron.vision.image_tokens_and_errors import ImageError

Image.MAX_IMAGE_PIXELS = None  # `decode` checks the number of pixels itself, against its own limit

_FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
_BAND_ROWS = 1024  # rows that are composited at a time, so that an image with transparency needs little more memory
_START_OF_SCAN = b"\xff\xda"
_ORIENTATION = 0x0112  # number of the EXIF tag
_TRANSPOSITIONS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


class ImageLimits(msgspec.Struct, frozen=True):
    """Limits on image files."""

    max_bytes: int = 20 << 20  # maximum size of a file, in bytes
    max_pixels: int = 1 << 26  # maximum number of pixels of an image before it is resized
    # Maximum number of scans of a JPEG image with `max_pixels` pixels. Smaller images may have more scans.
    max_scans: int = 16


def decode(data: bytes, limits: ImageLimits) -> Image.Image:
    """Return the first image in the file contents `data`, upright, with the mode RGB.

    Transparent pixels are composited on white. Gray values of 16 bits are reduced to their upper 8 bits.

    Raises:
        ImageError: the file is too large, has another format than PNG, JPEG, WebP or GIF, has too many pixels, or is
            damaged.
        MemoryError: the pixels do not fit into memory.
    """
    check_bytes(data, limits)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow warns about damage that it tolerates
            with Image.open(BytesIO(data), formats=_FORMATS) as image:
                _check_size(image.size, limits)
                if image.format == "JPEG":
                    _check_scans(data, image.size, limits)
                # The size is checked before the pixels are decoded, because a small file may claim a huge image.
                image.load()
                _check_size(image.size, limits)  # again, because a damaged file may state several sizes
                return _upright(_rgb(image), image)
    except (MemoryError, ImageError):
        raise
    except UnidentifiedImageError as error:
        raise ImageError(
            "the image is damaged, or its format is not PNG, JPEG, WebP or GIF; send another file"
        ) from error
    except Exception as error:  # Pillow's plugins raise many types of errors for damaged files
        detail = " ".join(str(error).split())[:200] or type(error).__name__
        raise ImageError(f"the image is damaged: {detail}; send another file") from error


def pixel_share(data: bytes, limits: ImageLimits) -> float:
    """Return an image's number of pixels as a share of `limits.max_pixels`, at most 1.

    The number of pixels comes from the header of the file. The result is 0 if the header cannot be read.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(BytesIO(data), formats=_FORMATS) as image:
                return min(image.size[0] * image.size[1] / limits.max_pixels, 1.0)
    except Exception:  # `decode` reports the error
        return 0.0


def check_bytes(data: bytes, limits: ImageLimits) -> None:
    """Raise an `ImageError` if the file contents `data` are larger than the limit."""
    if len(data) > limits.max_bytes:
        raise ImageError(f"the image has {len(data)} bytes, and the limit is {limits.max_bytes}; send a smaller file")


def _check_size(size: tuple[int, int], limits: ImageLimits) -> None:
    width, height = size
    if width < 1 or height < 1:
        raise ImageError(f"the image is empty, with {width} x {height} pixels; send another image")
    if width * height > limits.max_pixels:
        raise ImageError(
            f"the image has {width} x {height} pixels, and the limit is {limits.max_pixels} pixels; shrink the image"
        )


def _check_scans(data: bytes, size: tuple[int, int], limits: ImageLimits) -> None:
    """Reject a progressive JPEG file with so many scans that decoding takes long."""
    # Decoding visits all pixels in each scan. Common files have up to 12 scans. The count includes scans of thumbnails.
    scans = data.count(_START_OF_SCAN)
    if scans * size[0] * size[1] > limits.max_scans * limits.max_pixels:
        raise ImageError(
            f"the JPEG image has {scans} scans of {size[0]} x {size[1]} pixels, which take too long to decode; "
            "save the image with fewer scans"
        )


def _rgb(image: Image.Image) -> Image.Image:
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        return _on_white(image)
    if image.mode.startswith("I"):  # 16 bits, which Pillow would clip to 255
        image = image.point(lambda value: value * (1 / 256) + 0)
    return image if image.mode == "RGB" else image.convert("RGB")


def _on_white(image: Image.Image) -> Image.Image:
    width, height = image.size
    result = Image.new("RGB", image.size)
    for top in range(0, height, _BAND_ROWS):
        band = image.crop((0, top, width, min(top + _BAND_ROWS, height))).convert("RGBA")
        white = Image.new("RGBA", band.size, "white")
        result.paste(Image.alpha_composite(white, band).convert("RGB"), (0, top))
    return result


def _upright(image: Image.Image, source: Image.Image) -> Image.Image:
    """Return `image`, turned upright if the EXIF orientation of `source` is valid."""
    try:
        orientation = source.getexif().get(_ORIENTATION)
    except Exception:  # damaged metadata raise many types of errors
        return image
    transposition = _TRANSPOSITIONS.get(orientation) if isinstance(orientation, int) else None
    return image if transposition is None else image.transpose(transposition)
