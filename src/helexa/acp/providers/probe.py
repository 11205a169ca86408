"""Which wire API an endpoint speaks, found out by asking for nothing."""

from urllib.parse import urlsplit

from helexa.acp.config import Endpoint, WireApi
from helexa.acp.providers.connection import connect
from helexa.acp.providers.provider import ProviderError

_KNOWN: dict[str, WireApi] = {"api.anthropic.com": "anthropic-messages", "api.openai.com": "openai-responses"}
_PATHS: dict[str, WireApi] = {
    "/chat/completions": "openai-chat",
    "/responses": "openai-responses",
    "/messages": "anthropic-messages",
}


async def probe(endpoint: Endpoint) -> WireApi:
    """The first API that an endpoint has a route for, beginning with the one that most servers speak best.

    The questions are empty: they cost nothing, and any refusal but "no such route" says that there is one.

    Raises:
        ProviderError: it cannot be reached, or has none of them.
    """
    if known := _KNOWN.get(urlsplit(endpoint.base_url).hostname or ""):
        return known
    connection = await connect(endpoint, "openai")
    try:
        for path, api in _PATHS.items():
            if await connection.has_route(path):
                return api
    finally:
        await connection.close()
    known = ", ".join(_PATHS.values())
    raise ProviderError("invalid", f"{endpoint.name} at {endpoint.base_url} speaks none of {known}; is the path right?")
