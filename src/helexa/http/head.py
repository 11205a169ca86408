"""What a server reads in the head of any request, beside who sent it."""

import re
import secrets
from collections.abc import Iterable

from helexa.core.errors import ApiError

_ID = re.compile(rb"[A-Za-z0-9._-]{1,128}")


def request_id(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """The client's `x-request-id` if it is harmless, else a new one."""
    for name, value in headers:
        if name == b"x-request-id" and _ID.fullmatch(value):
            return value.decode()
    return secrets.token_hex(16)


def refuse_encoded(headers: Iterable[tuple[bytes, bytes]]) -> None:
    """Refuse a compressed body: what it would grow to is unknown until it is too late.

    Raises:
        ApiError: 415.
    """
    for name, value in headers:
        if name == b"content-encoding" and value.strip().lower() not in (b"", b"identity"):
            raise ApiError(415, "unsupported_content_encoding", "send the request body without a content-encoding")
