"""Computes an upper bound of the tokens of images and other files in a prompt, by one scan of the request body."""

import re
from collections.abc import Callable

import msgspec

IMAGE_TOKENS = 4096
"""Maximum number of tokens of one image or other file in a prompt."""

_LONG_BODY_BYTES = 16 << 10
_SEARCHED_QUOTES = 64
_MEDIA = ("image_url", "input_image", "image", "video_url", "audio_url", "input_file", "file")
_MEDIA_MEMBERS = ("image_url", "video_url", "audio_url", "file_url")


class PromptImages(msgspec.Struct, frozen=True):
    """The images of one prompt.

    Attributes:
        count: number of images.
        url_bytes: number of bytes of all data URLs in the request body. These bytes are not text of the prompt.
        tokens: estimated number of tokens of all images.
    """

    count: int = 0
    url_bytes: int = 0
    tokens: int = 0


NO_IMAGES = PromptImages()


def media_tokens(body: bytes) -> int:
    """Return the maximum number of tokens that the images and other files in a request body can have."""
    return IMAGE_TOKENS * _media_parts(body)


def has_media(body: bytes) -> bool:
    """Return whether a request body may contain an image or another file. False means that it contains none."""
    return _media_parts(body) > 0


def _media_parts(body: bytes) -> int:
    """Return an upper bound of the number of images and other files in a request body.

    Some servers recognize a file by the value of the key `type` in a content part. Other servers recognize a file by a
    key such as `image_url` in the content part. The function counts both, and returns the larger count.
    """
    matches = _find_all(_MEDIA_OR_ESCAPE, body)
    media_members = [name for name in matches if name]
    if any(b"\\" in name for name in media_members):
        matches = _ESCAPED_MEDIA.findall(body)
        media_members = [name for name in matches if name]
    return max(len(matches) - len(media_members), len(media_members))


def _find_all(pattern: re.Pattern[bytes], body: bytes) -> list[bytes]:
    """Return the result of `pattern.findall(body)`, which this function computes faster for long bodies.

    Each match begins with a quotation mark. `bytes.find` finds the next quotation mark faster than the pattern does.
    """
    matches: list[bytes] = []
    end = 0
    for _ in range(_SEARCHED_QUOTES if len(body) > _LONG_BODY_BYTES else 0):
        start = body.find(b'"', end)
        if start < 0:
            return matches
        match = pattern.match(body, start)
        if match is not None:
            matches.append(match[1] or b"")
        end = start + 1 if match is None else match.end()
    return matches + pattern.findall(body, end)


def _escapable(name: str) -> str:
    """Return a regular expression that matches `name` in a JSON string, also with letters written as `\\u00XX`."""
    return "".join(rf"(?:{letter}|\\u00(?i:{ord(letter):x}))" for letter in name)


def _media_pattern(name_pattern: Callable[[str], str], alternative: str = "") -> re.Pattern[bytes]:
    """Return a pattern that finds images and other files in a request body.

    A match is either the type of a content part, such as `"type": "image_url"`, or a JSON key, such as `"image_url":`.
    For a type, group 1 of the match is empty. For a key, group 1 contains the key and the colon.

    Args:
        name_pattern: function that returns the regular expression for a type or key.
        alternative: `|` and a regular expression that group 1 may match instead of a key, or an empty string.
    """
    types, members = ("|".join(map(name_pattern, names)) for names in (_MEDIA, _MEDIA_MEMBERS))
    initials = r"(?=[tivaf\\])"  # first letters of all names: most strings are rejected quickly
    return re.compile(
        rf'"{initials}(?:{name_pattern("type")}"\s*:\s*"(?:{types})"|((?:{members})"\s*:{alternative}))'.encode()
    )


_ESCAPED_MEDIA = _media_pattern(_escapable)
# Also matches strings with an escaped letter; if there are any, the slower pattern `_ESCAPED_MEDIA` is used.
_MEDIA_OR_ESCAPE = _media_pattern(str, r"|[a-z_]{0,11}+\\u00[4-7]")
