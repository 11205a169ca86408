"""Chat requests without pydantic: equal to the validated ones, and None for all others."""

from typing import Any

import pytest

from helexa.core.wire.openai_chat import ChatRequest
from helexa.neuron.requests.sampling_and_context_limit import sampling_params
from helexa.neuron.requests.text_chat import TextChat

BODY: dict[str, Any] = {
    "model": "m",
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "Again"},
    ],
    "stream": True,
    "max_tokens": 7,
    "seed": 3,
}
# what the package `requests` reads
ATTRIBUTES = (
    *(
        "alternatives",
        "enable_thinking",
        "forced_tool",
        "ignore_eos",
        "logit_bias",
        "max_reasoning_tokens",
        "must_call",
    ),
    *("offered_tools", "output_limit", "parallel_tool_calls", "scores_prompt", "shape", "stop", "stream"),
    "template_variables",
)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"stream": False, "enable_thinking": False},
        {"enable_thinking": True, "temperature": 1, "top_p": 0.25, "top_k": -1, "min_p": 0.5, "repetition_penalty": 2},
        {"frequency_penalty": -2, "presence_penalty": 2.0, "temperature": None, "seed": None, "max_tokens": 1},
    ],
)
def test_text_chat_read_without_pydantic_equals_the_pydantic_request(options: dict[str, Any]) -> None:
    text, validated = TextChat.of(BODY | options), ChatRequest.from_value(BODY | options)
    assert text is not None
    for name in ATTRIBUTES:
        assert getattr(text, name) == getattr(validated, name), name
    assert (text.n or 1, text.thinks(True), text.thinks(None)) == (1, validated.thinks(True), validated.thinks(None))
    assert [message.for_template() for message in text.messages] == [
        message.for_template() for message in validated.messages
    ]
    seed = {"seed": 5}
    parameters = [sampling_params(request, {"top_k": 9.0}) for request in (_with(text, seed), _with(validated, seed))]
    assert parameters[0] == parameters[1]


@pytest.mark.parametrize(
    "options",
    [
        {"stop": ["x"]},
        {"n": 2},
        {"tools": []},
        {"logprobs": True},
        {"response_format": {"type": "text"}},
        {"unknown": 1},
        {"temperature": 3},
        {"temperature": float("nan")},
        {"temperature": "1"},
        {"top_k": 1.5},
        {"seed": True},
        {"max_tokens": 0},
        {"stream": None},
        {"enable_thinking": "yes"},
        {"messages": []},
        {"messages": "Hello"},
        {"messages": [{"role": "tool", "content": "x"}]},
        {"messages": [{"role": "user", "content": None}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]},
        {"messages": [{"role": "user", "content": "x", "name": "y"}]},
        {"messages": [{"role": "user"}]},
        {"messages": ["Hello"]},
        {"messages": [{"role": "system", "content": "x-anthropic-billing-header: cch=fa690;\n\nBe brief."}]},
    ],
)
def test_chat_with_unsupported_options_is_not_parsed_without_pydantic(options: dict[str, Any]) -> None:
    assert TextChat.of(BODY | options) is None


def _with(request: Any, values: dict[str, Any]) -> Any:
    """Return a copy of the request with other values."""
    if isinstance(request, ChatRequest):
        return request.model_copy(update=values)
    fields = {name: getattr(request, name) for name in request.__dataclass_fields__}
    return TextChat(**fields | values)
