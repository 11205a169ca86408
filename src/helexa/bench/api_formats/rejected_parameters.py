"""Learns from error responses which optional parameters a model rejects, so that they are not sent again.

OpenAI's reasoning models reject `max_tokens`, `temperature` and `top_p`. Some of Anthropic's models reject
`temperature`, or `temperature` together with `top_p`. There is no built-in list of models, because it would soon be
outdated.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from helexa.bench.api_formats.api_format import mapping, text

_STATUSES = (400, 422)
_REJECTION = re.compile(
    r"unsupported|not supported|not support|deprecated|cannot both|unknown|unrecognized|unexpected|not permitted"
    r"|not allowed|forbidden",
    re.IGNORECASE,
)

Substitutes = Mapping[str, str | None]
"""Optional parameters of an API format. The value is the parameter's replacement, or None to omit the parameter."""


@dataclass(frozen=True, slots=True)
class RejectedParameters:
    """The parameters that each model of a server has rejected. All clients of the server share this object."""

    names: dict[str, set[str]] = field(default_factory=dict[str, set[str]])

    def replace(self, body: dict[str, Any], substitutes: Substitutes) -> dict[str, Any]:
        """Return the request body `body` without the parameters that the requested model has rejected before.

        If `substitutes` has a replacement for a rejected parameter, the replacement gets the value of the parameter.
        """
        names = self.names.get(body["model"], set())
        named = {substitutes[name] if name in names else name: value for name, value in body.items()}
        return {name: value for name, value in named.items() if name is not None}

    def learn(self, body: dict[str, Any], status: int, response: bytes, substitutes: Substitutes) -> str | None:
        """Find the parameter that an error response rejects, and remember it for the model of the request.

        Args:
            body: body of the rejected request.
            status: HTTP status of the response.
            response: body of the response.
            substitutes: optional parameters of the API format and their replacements.

        Returns:
            The rejected parameter, or None if the error has another cause.
        """
        name = _rejected(body, status, response, substitutes)
        if name is not None:
            self.names.setdefault(body["model"], set()).add(name)
        return name


def _rejected(body: dict[str, Any], status: int, response: bytes, substitutes: Substitutes) -> str | None:
    if status not in _STATUSES:
        return None
    try:
        error = mapping(mapping(orjson.loads(response)).get("error"))
    except ValueError:
        return None
    message = text(error.get("message"))
    if not _REJECTION.search(f"{text(error.get('code'))} {message}"):
        return None
    sent = [name for name in substitutes if name in body]
    if (parameter := text(error.get("param"))) in sent:
        return parameter
    return next((name for name in sent if re.search(rf"\b{name}\b", message)), None)
