"""Checks of data URLs."""

import base64
import binascii
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortex.images.image_server import PNG, PNG_URL
from helexa.core.image_file import ImageProblem, check_data_url, to_data_url

LIMIT = 1000


@pytest.mark.parametrize(
    "url",
    [
        PNG_URL,
        "data:image/jpg;base64,/9j/",
        "DATA:Image/GIF;charset=utf-8;BASE64,R0lGODlh",
        "data:image/webp;base64,UklGRg==",
        "data:image/png;base64," + base64.b64encode(bytes(LIMIT)).decode(),
    ],
)
def test_valid_data_url_of_an_image_is_accepted(url: str) -> None:
    check_data_url(url, LIMIT)


@pytest.mark.parametrize(
    ("url", "code"),
    [
        ("data:", "invalid_image_url"),
        ("data:,", "invalid_image_url"),
        ("data:image/png,abc", "invalid_image_url"),
        ("data:image/png;base64;x=y,iVBO", "invalid_image_url"),
        ("data:image/png;base64", "invalid_image_url"),
        ("data:;base64,iVBO", "unsupported_image_media_type"),
        ("data:image/svg+xml;base64,iVBO", "unsupported_image_media_type"),
        ("data:text/html;base64,iVBO", "unsupported_image_media_type"),
        ("data:application/octet-stream;base64,iVBO", "unsupported_image_media_type"),
        ("data:image/png;base64,", "empty_image_file"),
        ("data:image/png;base64,==", "empty_image_file"),
        ("data:image/png;base64,iVB", "invalid_base64_image"),
        ("data:image/png;base64,iV=O", "invalid_base64_image"),
        ("data:image/png;base64,iVB\n", "invalid_base64_image"),
        ("data:image/png;base64,iVB-", "invalid_base64_image"),
        ("data:image/png;base64,iVBé", "invalid_base64_image"),
        ("data:image/png;base64,iVBO===", "invalid_base64_image"),
        ("data:image/png;base64," + base64.b64encode(bytes(LIMIT + 1)).decode(), "image_too_large"),
    ],
)
def test_invalid_data_url_of_an_image_is_rejected(url: str, code: str) -> None:
    with pytest.raises(ImageProblem) as rejected:
        check_data_url(url, LIMIT)
    assert rejected.value.code == code
    assert len(str(rejected.value)) < 200


@given(st.text("Aa0+/=-\n ", max_size=12))
def test_valid_base64_in_a_data_url_is_accepted_and_invalid_rejected(text: str) -> None:
    is_valid = re.fullmatch("(?:[a-zA-Z0-9+/]{4})*(?:[a-zA-Z0-9+/]{2}==|[a-zA-Z0-9+/]{3}=)?", text) and text
    try:
        check_data_url(f"data:image/png;base64,{text}", LIMIT)
    except ImageProblem:
        assert not is_valid
    else:
        assert is_valid
        assert binascii.a2b_base64(text, strict_mode=True)


@pytest.mark.parametrize(
    ("data", "media_type"),
    [
        (PNG, "image/png"),
        (b"\xff\xd8\xff\xe0", "image/jpeg"),
        (b"GIF89a", "image/gif"),
        (b"RIFF\x00\x00\x00\x00WEBPVP8 ", "image/webp"),
    ],
)
def test_media_type_of_a_data_url_follows_the_contents_of_the_image(data: bytes, media_type: str) -> None:
    assert to_data_url(data) == f"data:{media_type};base64,{base64.b64encode(data).decode()}"


@pytest.mark.parametrize("data", [b"", b"<html>", b"RIFF\x00\x00\x00\x00WAVE", b"\x89PN"])
def test_file_that_is_no_supported_image_is_rejected(data: bytes) -> None:
    with pytest.raises(ImageProblem) as rejected:
        to_data_url(data)
    assert rejected.value.code == "invalid_image_format"
