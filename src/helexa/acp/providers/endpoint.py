"""Client of one endpoint: detects its API format, lists models, streams answers.

Importing this module imports an HTTP client library. The SDKs are imported at first use.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from urllib.parse import urlsplit

from helexa.acp.config import DEFAULT_BASE_URL, Endpoint, WireApi
from helexa.acp.providers.anthropic_messages import AnthropicMessages
from helexa.acp.providers.connection_and_api_format import ApiFormat, EndpointConnection, Json, connect
from helexa.acp.providers.error_responses import rejects, rejects_tools
from helexa.acp.providers.models import ModelCard, Provider, model_cards
from helexa.acp.providers.openai_chat import OpenAIChat
from helexa.acp.providers.openai_responses import OpenAIResponses
from helexa.acp.providers.requests_and_events import End, ModelEvent, ModelRequest, ProviderError
from helexa.acp.providers.written_calls import MarkerReader, with_written_calls

_API_BY_HOST: dict[str, WireApi] = {"api.anthropic.com": "anthropic-messages", "api.openai.com": "openai-responses"}
_PATHS: dict[str, WireApi] = {
    "/chat/completions": "openai-chat",
    "/responses": "openai-responses",
    "/messages": "anthropic-messages",
}


async def probe(endpoint: Endpoint) -> WireApi:
    """Return the API format of an endpoint, by its host name or by test requests.

    Raises:
        ProviderError: the endpoint cannot be reached, or supports none of the API formats.
    """
    if known := _API_BY_HOST.get(urlsplit(endpoint.base_url).hostname or ""):
        return known
    connection = await connect(endpoint, "openai")
    try:
        # Requests with empty bodies cost nothing. Any error except "route not found" means that the route exists.
        for path, api in _PATHS.items():
            if await connection.has_route(path):
                return api
    finally:
        await connection.close()
    known = ", ".join(_PATHS.values())
    raise ProviderError(
        "invalid",
        f"{endpoint.name} at {endpoint.base_url} supports none of the APIs {known}; correct base_url, "
        f"for example {DEFAULT_BASE_URL}",
    )


_TOOLS = "tools"


class EndpointProvider:
    """The client of one endpoint: an API format and a connection.

    Some compatible servers reject optional keys of the request body. If an error names such a key, the client repeats
    the request without the key, and omits the key in later requests with the same model and thought level. If a server
    rejects tools, the system prompt asks the model to write tool calls as text.
    """

    def __init__(self, endpoint: Endpoint, api_format: ApiFormat, connection: EndpointConnection) -> None:
        self.endpoint = endpoint
        self._api_format = api_format
        self._connection = connection
        self._rejected_keys: dict[tuple[str, str], frozenset[str]] = {}  # rejected keys by model and thought level

    async def stream(self, request: ModelRequest) -> AsyncGenerator[ModelEvent, None]:
        """Send a request and yield the events of the streamed response; see `Provider`."""
        key = (request.model, request.thought_level)
        while True:
            rejected = self._rejected_keys.get(key, frozenset())
            calls_in_text = bool(request.tools) and (self.endpoint.tool_calls == "text" or _TOOLS in rejected)
            body = self._api_format.body(
                with_written_calls(request) if calls_in_text else request, self.endpoint.name, rejected
            )
            begun = False
            try:
                async with aclosing(self._stream(request, body, calls_in_text)) as events:
                    async for event in events:
                        begun = True
                        yield event
                return
            except ProviderError as error:
                rejected_key = None if begun else self._rejected_key(error, body)
                if rejected_key is None:
                    raise
                self._rejected_keys[key] = rejected | {rejected_key}

    async def models(self) -> list[ModelCard]:
        """Request and return the list of the endpoint's models; see `Provider`."""
        body = await self._connection.get(self._api_format.models_path)
        try:
            return model_cards(body)
        except ValueError:
            raise ProviderError(
                "invalid", f"{self.endpoint.name} does not list its models; set default_model of this endpoint"
            ) from None

    async def close(self) -> None:
        """Close the connections to the endpoint; see `Provider`."""
        await self._connection.close()

    async def _stream(self, request: ModelRequest, body: Json, calls_in_text: bool) -> AsyncGenerator[ModelEvent, None]:
        reader = self._api_format.reader(request, self.endpoint.name)
        marker_reader = (
            MarkerReader(request, calls_requested=calls_in_text)
            if calls_in_text or self._api_format.leaks_markers
            else None
        )
        ended = False
        stream = self._connection.events(self._api_format.path, body, self._api_format.headers(request))
        async with aclosing(stream) as events:
            async for event in events:
                for model_event in reader.feed(event):
                    for output in marker_reader.read(model_event) if marker_reader else (model_event,):
                        yield output
        for event in reader.end():
            ended = ended or isinstance(event, End)
            for output in marker_reader.read(event) if marker_reader else (event,):
                yield output
        if not ended:
            raise ProviderError(
                "interrupted", f"{self.endpoint.name} ended its answer before it was complete; send the prompt again"
            )

    def _rejected_key(self, error: ProviderError, body: Json) -> str | None:
        """Return the key of `body` that the endpoint rejected and that can be omitted.

        Return None if the error has another cause, or if the rejected key must not be omitted.
        """
        present = body.keys() | {key for value in body.values() if isinstance(value, dict) for key in value}
        if _TOOLS in present and self.endpoint.tool_calls == "auto" and rejects_tools(error):
            return _TOOLS
        return next((key for key in self._api_format.optional if key in present and rejects(error, key)), None)


async def open_provider(endpoint: Endpoint) -> Provider:
    """Return a new client of an endpoint.

    If the configured API format is `auto`, detect the format; see `probe`. Otherwise, send no request.

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
