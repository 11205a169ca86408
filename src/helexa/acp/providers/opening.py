"""Connects providers to endpoints. Importing the module imports an HTTP client; SDKs are imported at first use."""

from helexa.acp.config import Endpoint, WireApi
from helexa.acp.providers.anthropic_messages import AnthropicMessages
from helexa.acp.providers.connection import connect
from helexa.acp.providers.openai_chat import OpenAIChat
from helexa.acp.providers.openai_responses import OpenAIResponses
from helexa.acp.providers.probe import probe
from helexa.acp.providers.provider import Provider
from helexa.acp.providers.wire import Wire
from helexa.acp.providers.wire_provider import WireProvider


async def open_provider(endpoint: Endpoint) -> Provider:
    """Connect to an endpoint, and return its provider. A wire API of `auto` is detected by `probe`.

    Raises:
        ProviderError: the wire API is `auto`, and probing the endpoint failed.
    """
    api = endpoint.wire_api if endpoint.wire_api != "auto" else await probe(endpoint)
    connection = await connect(endpoint, "anthropic" if api == "anthropic-messages" else "openai")
    return WireProvider(endpoint, _wire(api), connection)


def _wire(api: WireApi) -> Wire:
    match api:
        case "openai-responses":
            return OpenAIResponses()
        case "anthropic-messages":
            return AnthropicMessages()
        case _:
            return OpenAIChat()
