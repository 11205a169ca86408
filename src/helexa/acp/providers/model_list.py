"""Parses the `/v1/models` responses of different servers."""

from typing import Any

from helexa.acp.providers.provider import ModelCard

MAX_MODELS = 2000
_NOT_FOR_CHAT = {"embedding", "embeddings", "rerank", "moderation", "image", "audio", "tts"}


def model_cards(body: Any) -> list[ModelCard]:
    """Return the chat models in the parsed JSON of a `/v1/models` response, in the response's order.

    Invalid entries and models for other purposes, such as embeddings, are omitted.

    Raises:
        ValueError: `body` is not a list of models.
    """
    entries = body.get("data", body.get("models")) if isinstance(body, dict) else body
    if not isinstance(entries, list):
        raise ValueError("no list of models")
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
