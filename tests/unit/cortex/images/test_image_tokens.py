"""Estimates of image tokens from the sizes in the headers of image files that Pillow writes."""

import base64
from io import BytesIO
from typing import Any

import pytest
from PIL import Image

from helexa.core.image_file import LOW_DETAIL_TOKENS, MAX_TOKENS, MIN_TOKENS, TYPICAL_TOKENS, image_tokens

SIZE = (640, 480)  # 300 tokens


def url(format: str, size: tuple[int, int] = SIZE, mode: str = "RGB", **options: Any) -> str:
    file = BytesIO()
    Image.new(mode, size).save(file, format, **options)
    return f"data:image/{format};base64,{base64.b64encode(file.getvalue()).decode()}"


def exif(size: int) -> bytes:
    """Return EXIF data of this many bytes, such as a camera writes with a thumbnail."""
    return b"Exif\0\0" + bytes(size)


@pytest.mark.parametrize(
    "image",
    [
        url("png"),
        url("gif"),
        url("jpeg"),
        url("jpeg", progressive=True, exif=exif(20_000)),
        url("webp"),
        url("webp", lossless=True),
        url("webp", mode="RGBA", exif=exif(10)),
    ],
    ids=["png", "gif", "jpeg", "progressive", "webp", "lossless", "extended"],
)
def test_estimated_tokens_of_an_image_follow_from_its_size(image: str) -> None:
    assert image_tokens(image) == image_tokens(image.replace("data:", "DATA:"), "high") == 300
    assert image_tokens(image, "low") == LOW_DETAIL_TOKENS


@pytest.mark.parametrize(("size", "tokens"), [((1, 1), MIN_TOKENS), ((4000, 3000), MAX_TOKENS), ((1024, 768), 768)])
def test_estimated_tokens_of_an_image_do_not_exceed_the_maximum(size: tuple[int, int], tokens: int) -> None:
    assert image_tokens(url("png", size)) == tokens
    assert image_tokens(url("png", size), "low") == min(tokens, LOW_DETAIL_TOKENS)


@pytest.mark.parametrize(
    "image",
    [
        "https://example.com/a.png",
        "data:image/png;base64,",
        "data:image/png;base64,?",
        "data:",
        url("png")[:40],
        url("jpeg")[:60],
        url("webp")[:45],
        url("gif")[:32],
        "data:image/jpeg;base64,/9j/" + base64.b64encode(b"\xff\xe0\0\0" * 1000).decode(),
    ],
)
def test_image_of_unknown_size_has_a_typical_token_estimate(image: str) -> None:
    assert image_tokens(image) == TYPICAL_TOKENS
    assert image_tokens(image, "low") == LOW_DETAIL_TOKENS
