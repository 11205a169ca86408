"""Checks replies of a gateway against the types in its OpenAPI document."""

import re
from functools import cache
from typing import Any

from pydantic import TypeAdapter

from helexa.cortex.api import openapi_generation_schemas
from helexa.cortex.api.openapi_operations import OPERATIONS


def check_reply(path: str, reply: Any) -> None:
    """Fail if a successful reply to `GET path` of the gateway itself lacks a documented field, or has another one."""
    adapter = _adapter(path.partition("?")[0])
    if adapter is not None:
        adapter.validate_python(reply, extra="forbid")


@cache
def _adapter(path: str) -> TypeAdapter[Any] | None:
    for operation in OPERATIONS:
        method, _, template = operation.route.partition(" ")
        of_gateway = getattr(operation.reply, "__module__", "") != openapi_generation_schemas.__name__
        if method == "GET" and of_gateway and re.fullmatch(re.sub(r"{\w+}", "[^/]+", template), path):
            return TypeAdapter(operation.reply)
    return None
