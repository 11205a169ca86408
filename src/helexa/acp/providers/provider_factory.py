"""Creates the client of an endpoint in the endpoint's API format.

Importing this module imports an HTTP client library. The SDKs are imported at first use.
"""

from helexa.acp.config import Endpoint, WireApi
from helexa.acp.providers.anthropic_messages import AnthropicMessages
from helexa.acp.providers.api_format import ApiFormat
from helexa.acp.providers.connection import connect
from helexa.acp.providers.endpoint_provider import EndpointProvider
from helexa.acp.providers.openai_chat import OpenAIChat
from helexa.acp.providers.openai_responses import OpenAIResponses
from helexa.acp.providers.probe import probe
from helexa.acp.providers.provider import Provider


async def open_provider(endpoint: Endpoint) -> Provider:
    """Connect to an endpoint and return its client. If the configured API format is `auto`, detect the format.

    Raises:
        ProviderError: the API format is `auto` and could not be detected.
    """
    api = endpoint.wire_api if endpoint.wire_api != "auto" else await probe(endpoint)
    connection = await connect(endpoint, "anthropic" if api == "anthropic-messages" else "openai")
    return EndpointProvider(endpoint, _api_format(api), connection)


def _api_format(api: WireApi) -> ApiFormat:
    match api:
        case "openai-responses":
            return OpenAIResponses()
        case "anthropic-messages":
            return AnthropicMessages()
        case _:
            return OpenAIChat()
