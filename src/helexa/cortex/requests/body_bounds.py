"""Limits the number of JSON objects and arrays in a request body, because each one costs time and memory."""

import re

from helexa.core.errors import invalid_body

MAX_CONTAINERS = 500_000  # enough for 100,000 messages with 200,000 content parts

_TO_NEXT_CONTAINER = re.compile(rb'[^"{\[]*+(?:"[^"\\]*+(?:\\.[^"\\]*+)*+"[^"{\[]*+)*+[{\[]', re.DOTALL)


def check_containers(body: bytes) -> None:
    """Reject a JSON body with too many objects and arrays. The body is scanned once and not parsed.

    Brackets within strings are not counted. If the body is not valid JSON, only the bytes before the first syntax error
    are checked.

    Raises:
        ApiError: 400 `invalid_request_body`: the body has more than `MAX_CONTAINERS` objects and arrays.
    """
    if body.count(b"{") + body.count(b"[") <= MAX_CONTAINERS:
        return
    count, end = 0, 0
    while match := _TO_NEXT_CONTAINER.match(body, end):
        count, end = count + 1, match.end()
        if count > MAX_CONTAINERS:
            raise invalid_body(f"the request body has more than {MAX_CONTAINERS} objects and arrays")
