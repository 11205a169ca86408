"""The models of all configured endpoints: their properties, and the default."""

import asyncio
import dataclasses
import importlib
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any, Protocol

from helexa.acp.config import DEFAULT_MODEL, Endpoint, Settings, name_hint
from helexa.acp.providers.requests_and_events import ModelEvent, ModelRequest, ProviderError

MAX_MODELS = 2000
_NOT_FOR_CHAT = {"embedding", "embeddings", "rerank", "moderation", "image", "audio", "tts"}


@dataclass(frozen=True, slots=True)
class ModelCard:
    """The properties of a model, as its endpoint lists them.

    A property is None if it is unknown.
    """

    id: str  # model name in requests
    context: int | None = None  # context size in tokens, for prompt and response together
    max_output: int | None = None  # maximum number of response tokens
    input_price: float | None = None  # US dollars per million input tokens
    output_price: float | None = None  # US dollars per million output tokens
    cached_price: float | None = None  # US dollars per million cached input tokens
    images: bool | None = None  # whether the model accepts images
    thinks: bool | None = None  # whether a thought level (reasoning effort) has an effect on the model


class Provider(Protocol):
    """Interface of the client of one endpoint, as `Models` uses it.

    `stream` and `models` raise ProviderError if the endpoint fails.
    """

    endpoint: Endpoint

    def stream(self, request: ModelRequest) -> AsyncGenerator[ModelEvent, None]:
        """Send a request and yield the events of the streamed response.

        The last event is `End`.

        Closing the generator or canceling the calling task closes the connection immediately.
        """
        ...

    async def models(self) -> list[ModelCard]:
        """Request the endpoint's list of models and return it."""
        ...

    async def close(self) -> None:
        """Close the connections to the endpoint."""
        ...


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """The model that a session uses: names of the endpoint and of its model."""

    endpoint: str
    model: str

    def __str__(self) -> str:
        return f"{self.endpoint}:{self.model}"


class Models:
    """All configured endpoints and their models. The constructor sends no requests."""

    def __init__(self, settings: Settings) -> None:
        self._endpoints = {endpoint.name: endpoint for endpoint in settings.endpoints}
        self._default = settings.default_endpoint
        self._providers: dict[str, Provider] = {}
        self._locks = {name: asyncio.Lock() for name in self._endpoints}
        self._cards: dict[str, list[ModelCard]] = {}
        self._learned: dict[ModelChoice, int] = {}
        self._failures: dict[str, str] = {}

    async def refresh(self, timeout_s: float) -> None:
        """Request the model lists of all endpoints concurrently and store them.

        If an endpoint fails or does not respond within `timeout_s`, its previous list remains.
        """
        await asyncio.gather(*(self._refresh(name, timeout_s) for name in self._endpoints))

    async def _refresh(self, name: str, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                provider = await self._open(name)
                self._cards[name] = await provider.models()
        except TimeoutError:
            self._failures[name] = f"{name} did not list its models within {timeout_s:g} s; check that this server runs"
        except ProviderError as error:
            self._failures[name] = error.message
        else:
            self._failures.pop(name, None)

    def listed(self) -> dict[str, list[ModelCard]]:
        """Return the known models by endpoint name, in the order of the configuration.

        An endpoint's configured default model is included even if the endpoint does not list it. The only exception is
        `DEFAULT_MODEL`, if the endpoint lists other models.
        """
        return {name: self._listed(endpoint) for name, endpoint in self._endpoints.items()}

    def _listed(self, endpoint: Endpoint) -> list[ModelCard]:
        cards = self._cards.get(endpoint.name, [])
        model = endpoint.default_model
        if model is None or (cards and model == DEFAULT_MODEL) or any(card.id == model for card in cards):
            return list(cards)
        return [ModelCard(model), *cards]

    def default(self) -> ModelChoice | None:
        """Return the default model of new sessions, or None if no model is known."""
        first = self._endpoints[self._default]
        others = [endpoint for endpoint in self._endpoints.values() if endpoint is not first]
        for endpoint in (first, *others):
            ids = [card.id for card in self._listed(endpoint)]
            if endpoint.default_model in ids:
                return ModelChoice(endpoint.name, endpoint.default_model)
            if ids:
                return ModelChoice(endpoint.name, ids[0])
        return None

    def parse(self, text: str) -> ModelChoice:
        """Parse a model name that the user wrote as `endpoint:model`.

        The endpoint's name ends at the first colon. If no endpoint has this name, the whole text is the name of a model
        of the default endpoint.

        Raises:
            ValueError: the text is empty.
        """
        name, _, model = text.partition(":")
        if name in self._endpoints and model:
            return ModelChoice(name, model)
        if not text:
            raise ValueError("the model name is empty; write endpoint:model")
        return ModelChoice(self._default, text)

    def selection_error(self, choice: ModelChoice) -> str | None:
        """Return why the user cannot choose this model, or None if the choice is valid.

        If the endpoint's list of models is unknown, every model name is valid.
        """
        endpoint = self._endpoints.get(choice.endpoint)
        if endpoint is None:
            return f"there is no endpoint '{choice.endpoint[:100]}'; {name_hint(choice.endpoint, self._endpoints)}"
        cards = self._cards.get(choice.endpoint, [])
        ids = [card.id for card in cards]
        if not ids or choice.model in (*ids, endpoint.default_model):
            return None
        return f"{choice.endpoint} has no model '{choice.model[:100]}'; {name_hint(choice.model, ids)}"

    def card(self, choice: ModelChoice) -> ModelCard:
        """Return the known properties of a model.

        The context size is the first known value of the following:

        1. The size that the endpoint stated in an earlier error response.
        2. The size in the configuration.
        3. The size in the endpoint's model list.
        """
        endpoint = self._endpoints.get(choice.endpoint)
        known = next((card for card in self._cards.get(choice.endpoint, []) if card.id == choice.model), None)
        card = known or ModelCard(choice.model)
        configured = endpoint.context_window if endpoint else None
        return dataclasses.replace(card, context=self._learned.get(choice) or configured or card.context)

    def learn_context(self, choice: ModelChoice, tokens: int) -> None:
        """Store the context size that an endpoint stated in an error response."""
        self._learned[choice] = tokens

    async def provider(self, choice: ModelChoice) -> Provider:
        """Return the client of the endpoint that has the chosen model.

        The first call for an endpoint imports the SDK. If the configured API format is `auto`, the call also detects
        the format.

        Raises:
            ProviderError: the endpoint is unknown, or its API format cannot be detected.
        """
        if choice.endpoint not in self._endpoints:
            known = ", ".join(self._endpoints)
            raise ProviderError(
                "model_not_found", f"there is no endpoint '{choice.endpoint}'; known endpoints: {known}"
            )
        return await self._open(choice.endpoint)

    async def _open(self, name: str) -> Provider:
        async with self._locks[name]:
            if name not in self._providers:
                self._providers[name] = await _open(self._endpoints[name])
            return self._providers[name]

    def failures(self) -> dict[str, str]:
        """Return the error of each endpoint whose last `refresh` failed, by endpoint name."""
        return dict(self._failures)

    async def close(self) -> None:
        """Close the connections to all endpoints."""
        providers, self._providers = self._providers, {}
        await asyncio.gather(*(provider.close() for provider in providers.values()))


async def _open(endpoint: Endpoint) -> Provider:
    """Return a new client of an endpoint; see `open_provider`."""
    # The import of the module is slow, so it runs in a thread and does not block the event loop.
    opening = await asyncio.to_thread(importlib.import_module, "helexa.acp.providers.endpoint")
    return await opening.open_provider(endpoint)


def model_cards(body: Any) -> list[ModelCard]:
    """Return the cards of the chat models in a `/v1/models` response, in order.

    Invalid entries and models for other purposes, such as embeddings, are omitted.

    Raises:
        ValueError: `body` is not a list of models.
    """
    entries = body.get("data", body.get("models")) if isinstance(body, dict) else body
    if not isinstance(entries, list):
        raise ValueError("the endpoint's response is not a list of models")
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
        # Mistral and LM Studio send `vision`, Anthropic sends `image_input`.
        return _supported(capabilities.get("vision", capabilities.get("image_input")))
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
