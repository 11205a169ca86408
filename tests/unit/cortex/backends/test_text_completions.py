"""Text completions of third-party backends in the form of OpenAI's specification."""

import json

from helexa.cortex.backends.completion import convert_completion
from helexa.cortex.backends.completion_choice import Choice
from helexa.cortex.backends.stream import BackendStream


def new_choice() -> Choice:
    return Choice(lambda id: False)


def chunk(text: str | None, reason: str | None = None) -> bytes:
    """A chunk of LiteLLM, whose last chunk has null as text."""
    choice = {"index": 0, "text": text, "finish_reason": reason, "logprobs": None}
    fields = {"id": "c1", "object": "text_completion", "created": 1, "model": "m", "choices": [choice]}
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def test_null_text_of_a_backend_chunk_becomes_empty_text() -> None:
    stream = BackendStream(new_choice, model="m", chat=False)
    received = stream.feed(chunk("Hel") + chunk("lo") + chunk(None, "stop") + b"data: [DONE]\n\n")
    *events, done = received.decode().split("\n\n")[:-1]
    choices = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events]
    assert [choice["text"] for choice in choices] == ["Hel", "lo", ""]
    assert (choices[-1]["finish_reason"], done) == ("stop", "data: [DONE]")


def test_null_text_of_a_backend_completion_becomes_empty_text() -> None:
    body = json.dumps({"choices": [{"index": 0, "text": None, "finish_reason": "stop"}]}).encode()
    assert json.loads(convert_completion(body, new_choice, chat=False))["choices"][0]["text"] == ""
