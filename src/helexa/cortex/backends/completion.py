"""Converts whole completions (no streams) of a backend: choices and token counts."""

import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from helexa.core.sse import DONE, frame
from helexa.cortex.backends.completion_choice import FAILED, Choice
from helexa.cortex.backends.errors import error_in, failed_answer
from helexa.cortex.upstream.response_body import as_json, malformed, read_json

_MAX_DIGITS = 12
_CACHED = ("prompt_cache_hit_tokens", "cached_tokens")  # names of the cached tokens at DeepSeek and at Moonshot


def reported_usage(body: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the token counts of a completion or chunk; None if absent or all 0."""
    # Counts of 0 for both prompt and answer are treated as missing: some backends send zeros always, or until the end.
    # A well-formed `usage` object is returned unchanged.
    choices = body.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    groq = body.get("x_groq")
    sources = (body, choice, groq)
    for source in sources:
        usage = source.get("usage") if isinstance(source, dict) else None
        if isinstance(usage, dict) and (converted := _converted(usage)):
            return converted
    return None


def other_counts(body: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return token counts that llama.cpp or Ollama report outside of `usage`.

    Return None if `body` has no such counts, or if they are 0.
    """
    timings = body.get("timings")
    if isinstance(timings, dict) and "prompt_n" in timings:
        cached = _count(timings.get("cache_n")) or 0
        prompt = cached + (_count(timings["prompt_n"]) or 0)
        return _usage(prompt, _count(timings.get("predicted_n")) or 0, cached)
    if "prompt_eval_count" in body or "eval_count" in body:
        return _usage(_count(body.get("prompt_eval_count")) or 0, _count(body.get("eval_count")) or 0)
    return None


def _converted(usage: dict[str, Any]) -> dict[str, Any] | None:
    prompt, completion = _count(usage.get("prompt_tokens")), _count(usage.get("completion_tokens"))
    cached = _cached(usage)
    if prompt is None and (prompt := _count(usage.get("input_tokens"))) is not None and cached is None:
        # Without `input_tokens_details`, `input_tokens` has Anthropic's meaning. It does not include cached tokens, so
        # they are added.
        cached = _count(usage.get("cache_read_input_tokens"))
        prompt += (cached or 0) + (_count(usage.get("cache_creation_input_tokens")) or 0)
    if completion is None:
        completion = _count(usage.get("output_tokens"))
    if not prompt and not completion:
        return None
    prompt, completion = prompt or 0, completion or 0
    total = _count(usage.get("total_tokens")) or prompt + completion
    counts: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": total}
    if cached:
        details = usage.get("prompt_tokens_details")
        shown = details if isinstance(details, dict) else {}
        counts["prompt_tokens_details"] = {**shown, "cached_tokens": min(cached, prompt)}
    well_formed = all(usage.get(name) == count and type(usage.get(name)) is int for name, count in counts.items())
    return usage if well_formed else usage | counts


def _cached(usage: dict[str, Any]) -> int | None:
    """Return the cached token count from a field other than OpenAI's, else None.

    If OpenAI's field `prompt_tokens_details` has the number, the result is None, because nothing must be converted.
    """
    details = usage.get("prompt_tokens_details")
    if isinstance(details, dict) and details.get("cached_tokens") is not None:
        return None
    for fields, name in ((usage.get("input_tokens_details"), "cached_tokens"), *((usage, name) for name in _CACHED)):
        if isinstance(fields, dict) and (count := _count(fields.get(name))) is not None:
            return count
    return None


def _usage(prompt: int, completion: int, cached: int = 0) -> dict[str, Any] | None:
    if not prompt and not completion:
        return None
    counts: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }
    return counts | {"prompt_tokens_details": {"cached_tokens": cached}} if cached else counts


def _count(value: Any) -> int | None:
    """Convert a token count, also a float or digits, to an int; None if invalid."""
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= _MAX_DIGITS:
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 10**_MAX_DIGITS:
        return None
    return int(value)


Json = dict[str, Any]
NewChoice = Callable[[], Choice]


def convert_completion(body: bytes, new_choice: NewChoice, *, chat: bool) -> bytes:
    """Return a backend's completion in OpenAI's form; unchanged if well-formed.

    Raises:
        ApiError: the answer is an error, malformed (502), or contains no choice (502).
    """
    completion, strict_body = read_completion(body)
    converted = converted_completion(completion, new_choice, chat=chat)
    return strict_body if is_unchanged(converted, completion) else as_json(converted)


def is_unchanged(converted: Json, original: Json) -> bool:
    """Return whether the conversion of a completion changed nothing."""
    # `usage` is compared by identity: the counts 1 and 1.0 are equal in Python, but only 1 is well-formed.
    return converted.get("usage") is original.get("usage") and converted == original


def read_completion(body: bytes) -> tuple[Json, bytes]:
    """Parse a backend's completion. Return its fields, and its bytes as strict JSON.

    Raises:
        ApiError: the answer is an error, or not a JSON object (502).
    """
    if not body.strip():
        raise malformed("the response is empty")
    try:
        completion, strict_body = read_json(body)
    except ValueError:
        raise malformed("the response is not JSON") from None
    if not isinstance(completion, dict):
        raise malformed("the response is not a JSON object")
    if (error := error_in(completion)) is not None:
        raise error
    return completion, strict_body


def converted_completion(completion: Json, new_choice: NewChoice, *, chat: bool) -> Json:
    """Return a backend's parsed completion, converted to OpenAI's format.

    Raises:
        ApiError: 502: the answer contains no choice, or a choice says that it is not complete.
    """
    choices = completion.get("choices")
    if not isinstance(choices, list) or not choices or not all(isinstance(choice, dict) for choice in choices):
        raise malformed("the response has no choices")
    convert = _chat_choice if chat else _text_choice
    converted = completion | {"choices": [convert(choice, index, new_choice()) for index, choice in enumerate(choices)]}
    converted.setdefault("id", f"chatcmpl-{secrets.token_hex(12)}")
    converted.setdefault("created", int(time.time()))
    converted.setdefault("object", "chat.completion" if chat else "text_completion")
    if usage := reported_usage(completion) or other_counts(completion):
        converted["usage"] = usage
    else:
        converted.pop("usage", None)
    return converted


def _chat_choice(choice: Json, index: int, state: Choice) -> Json:
    message = choice.get("message")
    if not isinstance(message, dict):
        text = choice.get("text")
        if not isinstance(text, str):
            raise malformed("a choice of the response has no message")
        message = {"content": text}
    message = {"role": "assistant", "content": None} | {
        name: value for name, value in state.convert(message, whole=True).items() if name != "role"
    }
    if calls := message.get("tool_calls"):
        message["tool_calls"] = [{name: value for name, value in call.items() if name != "index"} for call in calls]
    reason = _whole_reason(choice, state)
    others = {name: value for name, value in choice.items() if name not in ("text", "usage", "delta")}
    return {"index": index, **others, "message": message, "finish_reason": reason}


def _text_choice(choice: Json, index: int, state: Choice) -> Json:
    return {"index": index, **choice, "text": choice.get("text") or "", "finish_reason": _whole_reason(choice, state)}


def _whole_reason(choice: Json, state: Choice) -> str:
    state.end(choice.get("finish_reason"))  # a missing reason is no error, because the body is complete
    if state.reason == FAILED:
        raise failed_answer(state.shown_reason)
    return state.last_reason() or ("tool_calls" if state.has_calls() else "stop")


def as_stream(completion: Json) -> bytes:
    """Return the stream of chunks for a chat completion from `converted_completion`."""
    head = {name: completion.get(name) for name in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    events: list[Json] = []
    for choice in completion["choices"]:
        delta = dict(choice["message"])
        if calls := delta.get("tool_calls"):
            delta["tool_calls"] = [{"index": index, **call} for index, call in enumerate(calls)]
        shown = {"index": choice["index"], "delta": delta, "finish_reason": choice["finish_reason"]}
        events.append(head | {"choices": [shown]})
    if usage := completion.get("usage"):
        events.append(head | {"choices": [], "usage": usage})
    return b"".join([frame(as_json(event)) for event in events]) + DONE


def joined(chunks: Iterable[Json]) -> Json:
    """Return the chat completion that the well-formed chunks of a stream contain.

    Raises:
        ApiError: 502: there are no choices.
    """
    completion: Json = {"object": "chat.completion", "choices": []}
    choices: dict[int, Json] = {}
    for chunk in chunks:
        completion |= {name: chunk[name] for name in ("id", "created", "model") if chunk.get(name) is not None}
        if usage := chunk.get("usage"):
            completion["usage"] = usage
        for part in chunk["choices"]:
            choice = choices.setdefault(part["index"], {"message": {"role": "assistant", "content": None}})
            _add_delta(choice["message"], part["delta"])
            choice["finish_reason"] = part.get("finish_reason") or choice.get("finish_reason")
    if not choices:
        raise malformed("the response has no choices")
    completion["choices"] = [{"index": index, **choice} for index, choice in sorted(choices.items())]
    return completion


def _add_delta(message: Json, delta: Json) -> None:
    for name in ("content", "reasoning_content", "reasoning", "refusal"):
        if isinstance(text := delta.get(name), str):
            message[name] = (message.get(name) or "") + text
    calls: list[Json] = message.setdefault("tool_calls", []) if delta.get("tool_calls") else []
    for call in delta.get("tool_calls") or ():
        while len(calls) <= call["index"]:
            calls.append({"type": "function", "function": {"arguments": ""}})
        shown = calls[call["index"]]
        shown.update({name: value for name, value in call.items() if name not in ("index", "function")})
        function = call.get("function") or {}
        shown["function"]["arguments"] += function.get("arguments") or ""
        if "name" in function:
            shown["function"]["name"] = function["name"]
