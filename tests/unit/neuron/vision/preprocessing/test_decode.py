"""Image files of all accepted formats become RGB pixels, and all other files are rejected with one line."""

import struct
import zlib

import numpy as np
import pytest
from PIL import Image, ImageOps
from transformers.image_transforms import convert_to_rgb

from helexa.neuron.vision.decode import ImageLimits, decode
from helexa.neuron.vision.image_tokens_and_errors import ImageError
from neuron.vision.images import encoded, noise

LIMITS = ImageLimits()


def pixels(data: bytes) -> np.ndarray:
    image = decode(data, LIMITS)
    assert image.mode == "RGB"
    return np.asarray(image)


def png(width: int, height: int, bits: int, color: int, rows: bytes) -> bytes:
    """Return a PNG file with the given header and pixel data."""

    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    header = struct.pack(">IIBBBBB", width, height, bits, color, 0, 0, 0)
    chunks = [chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(rows)), chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


@pytest.mark.parametrize(
    ("mode", "file_format"),
    [(mode, "PNG") for mode in ("RGB", "RGBA", "L", "LA", "P", "1")]
    + [(mode, "JPEG") for mode in ("RGB", "L", "CMYK")]
    + [(mode, "WEBP") for mode in ("RGB", "RGBA")]
    + [(mode, "GIF") for mode in ("RGB", "L", "P")],
)
def test_decoded_pixels_equal_those_of_transformers(mode: str, file_format: str) -> None:
    image = noise(70, 50, "RGB" if mode in ("P", "1") else mode)
    image = image.convert(mode) if image.mode != mode else image
    data = encoded(image, file_format)
    expected = convert_to_rgb(Image.open(__import__("io").BytesIO(data)), return_numpy=True)
    assert np.array_equal(pixels(data), np.asarray(expected))


def test_jpeg_with_many_scans_is_rejected_before_it_is_decoded() -> None:
    progressive = encoded(noise(64, 64), "JPEG", progressive=True)
    scans = progressive.count(b"\xff\xda")
    assert scans > 2
    begin = progressive.rindex(b"\xff\xda")
    data = progressive[:begin] + progressive[begin:-2] * 40 + progressive[-2:]
    small = ImageLimits(max_pixels=64 * 64)
    assert decode(progressive, small).size == (64, 64)
    with pytest.raises(ImageError, match=rf"has {scans + 39} scans of 64 x 64 pixels"):
        decode(data, small)


def test_transparent_pixels_become_white() -> None:
    image = Image.new("RGBA", (3, 2500), (255, 0, 0, 0))
    image.paste((0, 0, 255, 255), (0, 1024, 3, 2500))
    result = pixels(encoded(image))
    assert (result[:1024] == 255).all()
    assert (result[1024:] == (0, 0, 255)).all()


def test_transparent_palette_entry_becomes_white() -> None:
    image = Image.new("P", (4, 4), 1)
    image.putpalette([255, 0, 0, 0, 255, 0])
    image.putpixel((0, 0), 0)
    for file_format in ("PNG", "GIF"):
        result = pixels(encoded(image, file_format, transparency=0))
        assert result[0, 0].tolist() == [255, 255, 255]
        assert result[1, 1].tolist() == [0, 255, 0]


@pytest.mark.parametrize("color", [0, 2], ids=["gray", "RGB"])
def test_16_bit_color_values_are_reduced_to_their_upper_8_bits(color: int) -> None:
    values = np.arange(0, 65536, 257, dtype=">u2").reshape(1, -1)
    if color:
        values = values.repeat(3, axis=1)
    data = png(values.size // (3 if color else 1), 1, 16, color, b"\0" + values.tobytes())
    assert np.array_equal(pixels(data).reshape(-1, 3)[:, 0], np.arange(255 + (256 - 255)))


@pytest.mark.parametrize("file_format", ["GIF", "WEBP", "PNG"])
def test_animated_image_yields_its_first_frame(file_format: str) -> None:
    frames = [Image.new("RGB", (20, 20), color) for color in ("#800000", "#008000", "#000080")]
    data = encoded(frames[0], file_format, save_all=True, append_images=frames[1:], **LOSSLESS.get(file_format, {}))
    assert (pixels(data) == (0x80, 0, 0)).all()


LOSSLESS = {"WEBP": {"lossless": True}}


@pytest.mark.parametrize("file_format", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied(orientation: int, file_format: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(noise(30, 20), file_format, exif=exif)
    expected = ImageOps.exif_transpose(Image.open(__import__("io").BytesIO(data))).convert("RGB")
    assert np.array_equal(pixels(data), np.asarray(expected))


@pytest.mark.parametrize("exif", [b"Exif\0\0II*\0\xff\xff\xff\xff", b"Exif\0\0garbage", b"Exif\0\0"])
def test_damaged_exif_data_are_ignored(exif: bytes) -> None:
    image = noise(30, 20)
    assert np.array_equal(pixels(encoded(image, "JPEG", exif=exif)), pixels(encoded(image, "JPEG")))


@pytest.mark.parametrize("file_format", ["BMP", "TIFF", "PPM", "ICO", "TGA"])
def test_unsupported_image_formats_are_rejected(file_format: str) -> None:
    with pytest.raises(ImageError, match="format is not PNG, JPEG, WebP or GIF"):
        decode(encoded(noise(32, 32), file_format), LIMITS)


@pytest.mark.parametrize("data", [b"", b"text", b"<svg></svg>", b"\x89PNG\r\n\x1a\n", b"GIF89a", b"\xff\xd8\xff"])
def test_files_without_an_image_are_rejected(data: bytes) -> None:
    with pytest.raises(ImageError, match="the image is damaged"):
        decode(data, LIMITS)


@pytest.mark.parametrize("file_format", ["PNG", "JPEG", "WEBP", "GIF"])
@pytest.mark.parametrize("part", [0.3, 0.9])
def test_truncated_image_files_are_rejected(file_format: str, part: float) -> None:
    data = encoded(noise(200, 200), file_format)
    with pytest.raises(ImageError, match="the image is damaged") as raised:
        decode(data[: int(len(data) * part)], LIMITS)
    assert "\n" not in str(raised.value)


def test_image_file_above_the_byte_limit_is_rejected() -> None:
    data = encoded(noise(100, 100))
    decode(data, ImageLimits(max_bytes=len(data)))
    with pytest.raises(ImageError, match=f"{len(data)} bytes, and the limit is {len(data) - 1}"):
        decode(data, ImageLimits(max_bytes=len(data) - 1))


@pytest.mark.parametrize(
    "data",
    [
        png(60000, 60000, 8, 2, b""),
        b"GIF89a"
        + struct.pack("<HHBBB", 60000, 60000, 0, 0, 0)
        + b","
        + struct.pack("<HHHHB", 0, 0, 9, 9, 0)
        + b"\2\0",
    ],
    ids=["PNG", "GIF"],
)
def test_image_whose_header_states_too_many_pixels_is_rejected_before_decoding(data: bytes) -> None:
    with pytest.raises(ImageError, match="60000 x 60000 pixels, and the limit is 67108864 pixels"):
        decode(data, LIMITS)


def test_image_with_exactly_the_maximum_number_of_pixels_is_accepted() -> None:
    data = encoded(noise(30, 20))
    assert decode(data, ImageLimits(max_pixels=600)).size == (30, 20)
    with pytest.raises(ImageError, match="30 x 20 pixels, and the limit is 599 pixels"):
        decode(data, ImageLimits(max_pixels=599))


def test_compressed_metadata_of_a_png_are_not_expanded() -> None:
    """A small PNG with a text chunk that expands to 64 MiB."""
    text = zlib.compress(bytes(64 << 20))
    name, content = b"zTXt", b"Comment\0\0" + text
    chunk = struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))
    whole = encoded(noise(8, 8))
    header = whole.index(b"IDAT") - 4
    try:
        assert decode(whole[:header] + chunk + whole[header:], LIMITS).size == (8, 8)
    except ImageError as error:
        assert "damaged" in str(error)
