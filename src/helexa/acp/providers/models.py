"""The models of all configured endpoints: their properties, and the default."""

import asyncio
import dataclasses
import importlib
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Protocol

from helexa.acp.config import DEFAULT_MODEL, Endpoint, Settings, name_hint
from helexa.acp.providers.requests_and_events import ModelEvent, ModelRequest, ProviderError


@dataclass(frozen=True, slots=True)
class ModelCard:
    """The properties of a model, as its endpoint lists them; None if unknown."""

    id: str  # model name in requests
    context: int | None = None  # context size in tokens, for prompt and response together
    max_output: int | None = None  # maximum number of response tokens
    input_price: float | None = None  # US dollars per million input tokens
    output_price: float | None = None  # US dollars per million output tokens
    cached_price: float | None = None  # US dollars per million cached input tokens
    images: bool | None = None  # whether the model accepts images
    thinks: bool | None = None  # whether a thought level (reasoning effort) has an effect on the model


class Provider(Protocol):
    """A client of one endpoint. All methods raise `ProviderError` if it fails."""

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
            self._failures[name] = f"{name} did not list its models in time"
        except ProviderError as error:
            self._failures[name] = error.message
        else:
            self._failures.pop(name, None)

    def listed(self) -> dict[str, list[ModelCard]]:
        """Return the known models by endpoint name, in the order of the configuration.

        A default model that is configured for an endpoint is included even if the endpoint does not list it.
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

        The endpoint ends at the first colon. If it is unknown, the whole text is a model of the default endpoint.

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
        """Return why the user cannot choose this model, or None if it is possible."""
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
        """Return the error of each endpoint whose last `refresh` failed, by name."""
        return dict(self._failures)

    async def close(self) -> None:
        """Close the connections to all endpoints."""
        providers, self._providers = self._providers, {}
        await asyncio.gather(*(provider.close() for provider in providers.values()))


async def _open(endpoint: Endpoint) -> Provider:
    """Connect to an endpoint and return its client."""
    # The modules of the clients are imported in a thread, because the import is slow.
    opening = await asyncio.to_thread(importlib.import_module, "helexa.acp.providers.endpoint")
    return await opening.open_provider(endpoint)
