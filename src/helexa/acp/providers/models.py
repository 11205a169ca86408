"""All configured endpoints: their models, wire APIs and context sizes."""

import asyncio
import dataclasses
import importlib

from helexa.acp.config import DEFAULT_MODEL, Endpoint, Settings, name_hint
from helexa.acp.providers.provider import ModelCard, ModelChoice, Provider, ProviderError


class Models:
    """All configured endpoints and their models. The constructor sends no requests and imports no SDK."""

    def __init__(self, settings: Settings) -> None:
        self._endpoints = {endpoint.name: endpoint for endpoint in settings.endpoints}
        self._default = settings.default_endpoint
        self._providers: dict[str, Provider] = {}
        self._locks = {name: asyncio.Lock() for name in self._endpoints}
        self._cards: dict[str, list[ModelCard]] = {}
        self._learned: dict[ModelChoice, int] = {}
        self._failures: dict[str, str] = {}

    async def refresh(self, timeout_s: float) -> None:
        """Request the models of all endpoints concurrently.

        Endpoints that fail or time out keep their previous models.
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
        """Return the known models of each endpoint, in the order of the configuration.

        The endpoints' default models are always included.
        """
        return {name: self._listed(endpoint) for name, endpoint in self._endpoints.items()}

    def _listed(self, endpoint: Endpoint) -> list[ModelCard]:
        cards = self._cards.get(endpoint.name, [])
        model = endpoint.default_model
        if model is None or (cards and model == DEFAULT_MODEL) or any(card.id == model for card in cards):
            return list(cards)
        return [ModelCard(model), *cards]

    def default(self) -> ModelChoice | None:
        """Return the model of a new session, or None if no endpoint has a known model."""
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
        """Parse `endpoint:model`, split at the first colon.

        Text without a known endpoint is a model of the default endpoint.

        Raises:
            ValueError: the text is empty.
        """
        name, _, model = text.partition(":")
        if name in self._endpoints and model:
            return ModelChoice(name, model)
        if not text:
            raise ValueError("the model name is empty")
        return ModelChoice(self._default, text)

    def selection_error(self, choice: ModelChoice) -> str | None:
        """Return an error message if the endpoint is unknown or does not list the model, else None."""
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

        The context size is, in this order of preference: learned from errors, configured, or listed by the endpoint.
        """
        endpoint = self._endpoints.get(choice.endpoint)
        known = next((card for card in self._cards.get(choice.endpoint, []) if card.id == choice.model), None)
        card = known or ModelCard(choice.model)
        configured = endpoint.context_window if endpoint else None
        return dataclasses.replace(card, context=self._learned.get(choice) or configured or card.context)

    def learn_context(self, choice: ModelChoice, tokens: int) -> None:
        """Store the context size in tokens that an endpoint reported in an error."""
        self._learned[choice] = tokens

    async def provider(self, choice: ModelChoice) -> Provider:
        """Return the provider of a model. The first use imports its SDK and probes an `auto` endpoint.

        Raises:
            ProviderError: the endpoint is unknown, or its wire API cannot be determined.
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
        """Return an error message for each endpoint whose last refresh failed."""
        return dict(self._failures)

    async def close(self) -> None:
        """Close all endpoints."""
        providers, self._providers = self._providers, {}
        await asyncio.gather(*(provider.close() for provider in providers.values()))


async def _open(endpoint: Endpoint) -> Provider:
    """Import the provider modules in a thread, because the import is slow, then connect to the endpoint."""
    opening = await asyncio.to_thread(importlib.import_module, "helexa.acp.providers.opening")
    return await opening.open_provider(endpoint)
