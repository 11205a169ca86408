"""Upper bound of the tokens of images and other files in a prompt, from one scan of the request body."""

import re
from collections.abc import Callable

IMAGE_TOKENS = 4096
"""Tokens of one image in a prompt, regardless of the length of its URL."""

_LONG_BYTES = 16 << 10
_FEW_QUOTES = 64
_MEDIA = ("image_url", "input_image", "image", "video_url", "audio_url", "input_file", "file")
_MEDIA_MEMBERS = ("image_url", "video_url", "audio_url", "file_url")


def media_tokens(body: bytes) -> int:
    """Return the maximum number of tokens that the images and other files in a request body can have."""
    return IMAGE_TOKENS * _media_parts(body)


def _media_parts(body: bytes) -> int:
    """Return the maximum number of images and other files that a server can find in a prompt.

    Some servers read the type of a content part, others the name of its member.
    """
    matches = _find_all(_MEDIA_OR_ESCAPE, body)
    media_members = [name for name in matches if name]
    if any(b"\\" in name for name in media_members):
        matches = _ESCAPED_MEDIA.findall(body)
        media_members = [name for name in matches if name]
    return max(len(matches) - len(media_members), len(media_members))


def _find_all(pattern: re.Pattern[bytes], body: bytes) -> list[bytes]:
    """Return `pattern.findall(body)`.

    Each match begins with a quote, and `find` skips the text before it faster.
    """
    matches: list[bytes] = []
    end = 0
    for _ in range(_FEW_QUOTES if len(body) > _LONG_BYTES else 0):
        start = body.find(b'"', end)
        if start < 0:
            return matches
        match = pattern.match(body, start)
        if match is not None:
            matches.append(match[1] or b"")
        end = start + 1 if match is None else match.end()
    return matches + pattern.findall(body, end)


def _escapable(name: str) -> str:
    """Return a pattern for `name` in JSON, in which any letter may be escaped."""
    return "".join(rf"(?:{letter}|\\u00(?i:{ord(letter):x}))" for letter in name)


def _media_pattern(spelled: Callable[[str], str], more: str = "") -> re.Pattern[bytes]:
    """Return a pattern for a content part's type, or for a member's name as the group of the match.

    Args:
        spelled: returns the pattern of a name.
        more: alternative to the pattern after a member's name.
    """
    types, members = ("|".join(map(spelled, names)) for names in (_MEDIA, _MEDIA_MEMBERS))
    initials = r"(?=[tivaf\\])"  # first letters of all names: most strings are rejected quickly
    return re.compile(rf'"{initials}(?:{spelled("type")}"\s*:\s*"(?:{types})"|((?:{members})"\s*:{more}))'.encode())


_ESCAPED_MEDIA = _media_pattern(_escapable)
# The same scan also finds strings that begin with letters and contain an escaped letter; the slower pattern follows.
_MEDIA_OR_ESCAPE = _media_pattern(str, r"|[a-z_]{0,11}+\\u00[4-7]")
