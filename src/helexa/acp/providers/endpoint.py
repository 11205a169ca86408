"""Client of one endpoint: detects its API format, lists models, streams answers.

Importing this module imports an HTTP client library. The SDKs are imported at first use.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any
from urllib.parse import urlsplit

from helexa.acp.config import Endpoint, WireApi
from helexa.acp.providers.anthropic_messages import AnthropicMessages
from helexa.acp.providers.connection import ApiFormat, EndpointConnection, Json, connect
from helexa.acp.providers.error_responses import rejects, rejects_tools
from helexa.acp.providers.models import ModelCard, Provider
from helexa.acp.providers.openai_chat import OpenAIChat
from helexa.acp.providers.openai_responses import OpenAIResponses
from helexa.acp.providers.requests_and_events import End, ModelEvent, ModelRequest, ProviderError
from helexa.acp.providers.written_calls import MarkerReader, with_written_calls

MAX_MODELS = 2000
_NOT_FOR_CHAT = {"embedding", "embeddings", "rerank", "moderation", "image", "audio", "tts"}


def model_cards(body: Any) -> list[ModelCard]:
    """Return the chat models in the JSON of a `/v1/models` response, in order.

    Invalid entries and models for other purposes, such as embeddings, are omitted.

    Raises:
        ValueError: `body` is not a list of models.
    """
    entries = body.get("data", body.get("models")) if isinstance(body, dict) else body
    if not isinstance(entries, list):
        raise ValueError("the response is not a list of models")
    cards = [card for entry in entries[:MAX_MODELS] if isinstance(entry, dict) and (card := _card(entry))]
    return list({card.id: card for card in cards}.values())


def _card(entry: dict[str, Any]) -> ModelCard | None:
    id = entry.get("id") or entry.get("name") or entry.get("model")
    if not isinstance(id, str) or not id or not id.isprintable() or len(id) > 300:
        return None
    if str(entry.get("type")) in _NOT_FOR_CHAT:
        return None
    limit, top, meta = _object(entry, "limit"), _object(entry, "top_provider"), _object(entry, "meta")
    cost, pricing = _object(entry, "cost"), _object(entry, "pricing")
    capabilities = entry.get("capabilities")
    return ModelCard(
        id=id,
        context=_first(
            limit.get("context"),  # helexa
            entry.get("max_model_len"),  # vLLM
            entry.get("loaded_context_length"),  # LM Studio: the loaded context, which may be below the model's maximum
            top.get("context_length"),  # OpenRouter: the context of the endpoint
            entry.get("context_length"),
            meta.get("n_ctx"),  # llama.cpp
            entry.get("context_window"),  # Groq
            entry.get("max_context_length"),  # LM Studio, Mistral
            entry.get("max_input_tokens"),  # Anthropic
            meta.get("n_ctx_train"),
        ),
        max_output=_first(
            limit.get("output"),
            entry.get("max_output_tokens"),
            top.get("max_completion_tokens"),
            entry.get("max_completion_tokens"),
            entry.get("max_tokens"),  # Anthropic
        ),
        input_price=_price(cost.get("input"), pricing.get("prompt")),
        output_price=_price(cost.get("output"), pricing.get("completion")),
        cached_price=_price(cost.get("cache_read"), pricing.get("input_cache_read")),
        images=_images(entry, capabilities),
        thinks=_thinks(entry, capabilities),
    )


def _images(entry: dict[str, Any], capabilities: Any) -> bool | None:
    modalities = _object(entry, "architecture").get("input_modalities")
    if isinstance(modalities, list):  # OpenRouter
        return "image" in modalities
    if isinstance(capabilities, list) and capabilities:  # helexa, Ollama
        return "vision" in capabilities or "image" in capabilities
    if isinstance(capabilities, dict):
        return _supported(capabilities.get("vision", capabilities.get("image_input")))  # Mistral, LM Studio; Anthropic
    return True if entry.get("type") == "vlm" else None


def _thinks(entry: dict[str, Any], capabilities: Any) -> bool | None:
    if isinstance(entry.get("reasoning"), bool):
        return entry["reasoning"]
    parameters = entry.get("supported_parameters")
    if isinstance(parameters, list):
        return "reasoning" in parameters
    if isinstance(capabilities, dict):
        return _supported(capabilities.get("thinking", capabilities.get("reasoning")))
    if isinstance(capabilities, list) and "thinking" in capabilities:
        return True
    return None


def _supported(value: Any) -> bool | None:
    if isinstance(value, dict):
        value = value.get("supported")
    return value if isinstance(value, bool) else None


def _first(*values: Any) -> int | None:
    return next(
        (value for value in values if isinstance(value, int) and not isinstance(value, bool) and value > 0), None
    )


def _price(per_million: Any, per_token: Any) -> float | None:
    """Return the price in US dollars per million tokens, or None if unknown.

    Args:
        per_million: listed price of a million tokens, or None.
        per_token: listed price of one token, or None. OpenRouter lists it as text, and -1 if the price is unknown.
    """
    try:
        price = float(per_million) if isinstance(per_million, int | float) else float(per_token) * 1e6
    except (TypeError, ValueError):
        return None
    return price if 0 <= price < 1e6 else None


def _object(entry: dict[str, Any], key: str) -> dict[str, Any]:
    value = entry.get(key)
    return value if isinstance(value, dict) else {}


_API_BY_HOST: dict[str, WireApi] = {"api.anthropic.com": "anthropic-messages", "api.openai.com": "openai-responses"}
_PATHS: dict[str, WireApi] = {
    "/chat/completions": "openai-chat",
    "/responses": "openai-responses",
    "/messages": "anthropic-messages",
}


async def probe(endpoint: Endpoint) -> WireApi:
    """Return the API format of an endpoint: the first one whose route exists.

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
        "invalid", f"{endpoint.name} at {endpoint.base_url} supports none of {known}; check the path of base_url"
    )


_TOOLS = "tools"


class EndpointProvider:
    """The client of one endpoint: an API format and a connection.

    Some compatible servers reject optional keys of the request body. If an error names such a key, the client repeats
    the request without the key, and omits the key in later requests to the same model. If a server rejects tools, the
    system prompt asks the model to write tool calls as text.
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
                "invalid", f"{self.endpoint.name} does not list its models; set default_model"
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
        """Return the optional key of the request body that the endpoint rejected."""
        # Return None if the error has another cause, or if the key must not be omitted.
        present = body.keys() | {key for value in body.values() if isinstance(value, dict) for key in value}
        if _TOOLS in present and self.endpoint.tool_calls == "auto" and rejects_tools(error):
            return _TOOLS
        return next((key for key in self._api_format.optional if key in present and rejects(error, key)), None)


async def open_provider(endpoint: Endpoint) -> Provider:
    """Connect to an endpoint and return its client.

    If the configured API format is `auto`, detect the format.

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
