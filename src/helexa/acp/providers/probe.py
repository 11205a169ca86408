"""Detects the API format of an endpoint with empty test requests."""

from urllib.parse import urlsplit

from helexa.acp.config import Endpoint, WireApi
from helexa.acp.providers.connection import connect
from helexa.acp.providers.provider import ProviderError

_API_BY_HOST: dict[str, WireApi] = {"api.anthropic.com": "anthropic-messages", "api.openai.com": "openai-responses"}
_PATHS: dict[str, WireApi] = {
    "/chat/completions": "openai-chat",
    "/responses": "openai-responses",
    "/messages": "anthropic-messages",
}


async def probe(endpoint: Endpoint) -> WireApi:
    """Return the API format of an endpoint, which is the first format whose route exists.

    The routes of chat completions, Responses and Anthropic messages are tested in this order. The requests have empty
    bodies and cost nothing. Any error except "route not found" means that the route exists.

    Raises:
        ProviderError: the endpoint cannot be reached, or supports none of the API formats.
    """
    if known := _API_BY_HOST.get(urlsplit(endpoint.base_url).hostname or ""):
        return known
    connection = await connect(endpoint, "openai")
    try:
        for path, api in _PATHS.items():
            if await connection.has_route(path):
                return api
    finally:
        await connection.close()
    known = ", ".join(_PATHS.values())
    raise ProviderError(
        "invalid", f"{endpoint.name} at {endpoint.base_url} supports none of {known}; check the path of base_url"
    )
