"""Upper bound of the tokens of images and other files in a prompt, computed by one scan of the request body."""

import re
from collections.abc import Callable

IMAGE_TOKENS = 4096
"""Tokens of one image in a prompt, regardless of the length of its URL."""

_LONG_BODY_BYTES = 16 << 10
_SEARCHED_QUOTES = 64
_MEDIA = ("image_url", "input_image", "image", "video_url", "audio_url", "input_file", "file")
_MEDIA_MEMBERS = ("image_url", "video_url", "audio_url", "file_url")


def media_tokens(body: bytes) -> int:
    """Return the maximum number of tokens that the images and other files in a request body can have."""
    return IMAGE_TOKENS * _media_parts(body)


def _media_parts(body: bytes) -> int:
    """Return an upper bound of the number of images and other files in a prompt.

    Some servers recognize a file by the type of its content part, others by the name of the part's member.
    """
    matches = _find_all(_MEDIA_OR_ESCAPE, body)
    media_members = [name for name in matches if name]
    if any(b"\\" in name for name in media_members):
        matches = _ESCAPED_MEDIA.findall(body)
        media_members = [name for name in matches if name]
    return max(len(matches) - len(media_members), len(media_members))


def _find_all(pattern: re.Pattern[bytes], body: bytes) -> list[bytes]:
    """Return the result of `pattern.findall(body)`, but compute it faster for long bodies.

    Each match begins with a quotation mark, and `bytes.find` finds the next quotation mark faster than the pattern.
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
    """Return a regular expression for `name` in a JSON string, in which any letter may be escaped."""
    return "".join(rf"(?:{letter}|\\u00(?i:{ord(letter):x}))" for letter in name)


def _media_pattern(name_pattern: Callable[[str], str], alternative: str = "") -> re.Pattern[bytes]:
    """Return a pattern for a content part's type, or for a member's name as the group of the match.

    Args:
        name_pattern: function that returns the pattern of a name.
        alternative: pattern to append after a member's name, such as `|...`.
    """
    types, members = ("|".join(map(name_pattern, names)) for names in (_MEDIA, _MEDIA_MEMBERS))
    initials = r"(?=[tivaf\\])"  # first letters of all names: most strings are rejected quickly
    return re.compile(
        rf'"{initials}(?:{name_pattern("type")}"\s*:\s*"(?:{types})"|((?:{members})"\s*:{alternative}))'.encode()
    )


_ESCAPED_MEDIA = _media_pattern(_escapable)
# Also matches strings with an escaped letter; if there are any, the slower pattern `_ESCAPED_MEDIA` is used.
_MEDIA_OR_ESCAPE = _media_pattern(str, r"|[a-z_]{0,11}+\\u00[4-7]")
