"""Every feature in every API format, streamed and not, with the official clients, through a gateway and a node.

The model generates exactly the text that a case prescribes. Features that an API format lacks are left out.
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import anthropic
import openai
import pytest
import pytest_asyncio

from clients.api_formats import API_FORMATS, MIN_BUDGET, Completion, Request
from clients.scripted_engine import say
from clients.scripted_stack import SayingStack, saying_stack

ADD: dict[str, Any] = {
    "name": "add",
    "description": "Adds two numbers.",
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    },
}
SUBTRACT: dict[str, Any] = {**ADD, "name": "subtract"}
CALL = ("add", {"a": 1, "b": 2})
CALL_TEXT = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
BROKEN = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": }}\n</tool_call>'
# invalid escapes, quotation marks without a backslash, doubled braces, a literal of Python, and a trailing comma
WRONG_JSON = '{{"name": "add", "arguments": {{"a": 1.0, "b": "2", "c": "C:\\Users "x"", "d": None,}}}}'
WRONG = f"So:<tool_call>\n{WRONG_JSON}\n</tool_call>"
WRONG_CALL = ("add", {"a": 1, "b": 2, "c": 'C:\\Users "x"', "d": None})
AGE = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"], "additionalProperties": False}


@dataclass(frozen=True)
class Case:
    """One feature: a request, the expected completion, and what must reach the engine.

    Attributes:
        in_prompt, not_in_prompt: texts that the prompt must or must not contain.
        in_grammar, not_in_grammar: texts that the grammar must or must not contain; if both are empty, the request must
            have no grammar.
        discarded_tokens: tokens that the engine generates after the end of the completion; None if unspecified.
        message: the expected completion in the Messages API without streaming, if it differs: a truncated tool call is
            text there.
    """

    request: Request
    completion: Completion
    in_prompt: tuple[str, ...] = ()
    not_in_prompt: tuple[str, ...] = ()
    seed: int | None = None
    in_grammar: tuple[str, ...] = ()
    not_in_grammar: tuple[str, ...] = ()
    discarded_tokens: int | None = 0
    message: Completion | None = None


CASES = {
    "plain": Case(Request(say("Grüße 🦊")), Completion("Grüße 🦊", finish="stop")),
    "tools": Case(
        Request(say(f"Adding.{CALL_TEXT}"), tools=(ADD,)),
        Completion("Adding.", calls=[CALL], finish="tool_calls"),
        in_prompt=('"add"',),
    ),
    "two calls of tools": Case(
        Request(say(f"{CALL_TEXT}\n{CALL_TEXT}"), tools=(ADD,)), Completion(calls=[CALL, CALL], finish="tool_calls")
    ),
    "a tool's call that is none": Case(
        Request(say("<tool_call>\nadd them\n</tool_call>"), tools=(ADD,)),
        Completion("<tool_call>\nadd them\n</tool_call>", finish="stop"),
    ),
    "a tool's call whose arguments go wrong": Case(
        Request(say(f"So:{BROKEN}"), tools=(ADD,)),
        Completion("So:", calls=[("add", None)], finish="stop"),
        message=Completion('So:{"name":"add","arguments":"{\\"a\\": 1, \\"b\\": "}', finish="stop"),
    ),
    "a tool's call with mistakes": Case(
        Request(say(WRONG), tools=(ADD,)), Completion("So:", calls=[WRONG_CALL], finish="tool_calls")
    ),
    "a tool's call at the end of unclosed thinking": Case(
        Request(say(f"<think>\nhm\n{CALL_TEXT}"), thinking=True, tools=(ADD,)),
        Completion(reasoning="hm", calls=[CALL], finish="tool_calls"),
    ),
    "a tool's call cut before its arguments": Case(
        Request(say(f"So:{CALL_TEXT}"), tools=(ADD,), max_tokens=30), Completion("So:", finish="length")
    ),
    "a tool's call that ends in its arguments": Case(
        Request(say(f"So:{BROKEN[: BROKEN.index('}')]}"), tools=(ADD,)),
        Completion("So:", calls=[("add", None)], finish="stop"),
        message=Completion('So:{"name":"add","arguments":"{\\"a\\": 1, \\"b\\": "}', finish="stop"),
    ),
    "tools unused": Case(
        Request(say("No need."), tools=(ADD,)), Completion("No need.", finish="stop"), in_prompt=('"add"',)
    ),
    "forced tool": Case(
        Request(say(CALL_TEXT), tools=(ADD, SUBTRACT), forced="add"),
        Completion(calls=[CALL], finish="tool_calls"),
        in_grammar=("add",),
        not_in_grammar=("subtract",),
    ),
    "a tool required": Case(
        Request(say(CALL_TEXT), tools=(ADD, SUBTRACT), choice="required"),
        Completion(calls=[CALL], finish="tool_calls"),
        in_grammar=("add", "subtract"),
    ),
    "no tool allowed": Case(
        Request(say(CALL_TEXT), tools=(ADD,), choice="none"),
        Completion(CALL_TEXT, finish="stop"),
        not_in_prompt=('"add"',),
    ),
    "one tool at a time": Case(
        Request(say(f"{CALL_TEXT}\n{CALL_TEXT}"), tools=(ADD,), parallel=False),
        Completion(calls=[CALL], finish="tool_calls"),
        discarded_tokens=None,
    ),
    "tool history": Case(
        Request(say("Three."), tools=(ADD,), history=((CALL, "the sum is 3"),)),
        Completion("Three.", finish="stop"),
        in_prompt=('"add"', '"a": 1', '"b": 2', "the sum is 3"),
    ),
    "thinking": Case(
        Request(say("<think>\nhm\n</think>\n\nYes."), thinking=True),
        Completion("Yes.", reasoning="hm", finish="stop"),
        in_prompt=("<think>",),
    ),
    "thinking, then a tool": Case(
        Request(say(f"<think>\nhm\n</think>\n\n{CALL_TEXT}"), thinking=True, tools=(ADD,)),
        Completion(reasoning="hm", calls=[CALL], finish="tool_calls"),
    ),
    "thinking to its budget": Case(
        Request(say(f"<think>\n{'h' * 2000}\n</think>\n\nYes."), thinking=True, budget=MIN_BUDGET, max_tokens=4000),
        Completion("Yes.", reasoning="h" * MIN_BUDGET, finish="stop"),
        discarded_tokens=None,
    ),
    "thinking, then a schema": Case(
        Request(say('<think>\nhm\n</think>\n\n{"age": 7}'), thinking=True, schema=AGE),
        Completion('{"age": 7}', reasoning="hm", finish="stop"),
        in_grammar=("age",),
    ),
    "thinking, then a schema with markers in a string": Case(
        Request(say(f'<think>\nhm\n</think>\n\n{{"age": "</think> {CALL_TEXT[:11]}"}}'), thinking=True, schema=AGE),
        Completion('{"age": "</think> <tool_call>"}', reasoning="hm", finish="stop"),
        in_grammar=("age",),
    ),
    "thinking unasked": Case(Request(say("<think>hm</think>Yes.")), Completion("Yes.", reasoning="hm", finish="stop")),
    "no thinking": Case(
        Request(say("Yes."), thinking=False), Completion("Yes.", finish="stop"), ("<think>\n\n</think>\n\n",)
    ),
    "truncated in thought": Case(
        Request(say("<think>\nhmmmm"), thinking=True, max_tokens=3),
        Completion(reasoning="hmm", finish="length"),
        in_prompt=("<think>",),
    ),
    "truncated": Case(Request(say("too long"), max_tokens=3), Completion("too", finish="length")),
    "schema": Case(
        Request(say('{"age": 7}'), schema=AGE), Completion('{"age": 7}', finish="stop"), in_grammar=("age",)
    ),
    "stop string": Case(
        Request(say("one END two"), stop="END"), Completion("one ", finish="stop"), discarded_tokens=len(" two") + 1
    ),
    "two answers": Case(Request(say("Yes."), n=2), Completion("Yes.", finish="stop")),
    "seed": Case(Request(say("Yes."), seed=7), Completion("Yes.", finish="stop"), seed=7),
}

# (API format, case) pairs that the API format cannot express.
UNSUPPORTED = {("completions", case) for case in CASES if "tool" in case or "think" in case or "thought" in case}

# Rejected pairs: status, error code and a part of the message.
REJECTED: dict[tuple[str, str], tuple[int, str, str]] = {
    ("messages", "two answers"): (400, "invalid_anthropic_body", "n: is not a field of the Messages API"),
    ("responses", "two answers"): (400, "unsupported_parameter", "'n'"),
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[SayingStack]:
    async with saying_stack(tmp_path_factory.mktemp("saying")) as stack:
        yield stack


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    ("api_format", "name"),
    [(api_format, name) for api_format in API_FORMATS for name in CASES if (api_format, name) not in UNSUPPORTED],
)
@pytest.mark.asyncio(loop_scope="module")
async def test_each_api_feature_succeeds_or_is_rejected_as_documented(
    stack: SayingStack, api_format: str, name: str, stream: bool
) -> None:
    case, send = CASES[name], API_FORMATS[api_format]
    if rejection := REJECTED.get((api_format, name)):
        status, code, message = rejection
        with pytest.raises((openai.APIStatusError, anthropic.APIStatusError), match=message) as caught:
            await send(stack, case.request, stream=stream)
        body: Any = caught.value.body
        assert caught.value.status_code == status
        assert api_format == "messages" or body["code"] == code  # Anthropic's errors have no codes
        return
    earlier = len(stack.received_requests())
    result = await send(stack, case.request, stream=stream)
    received = stack.received_requests()[earlier:]
    assert result.prompt_tokens == received[0]["prompt_tokens"]
    generated = sum(request["completion_tokens"] for request in received)
    assert case.discarded_tokens is None or result.completion_tokens == generated - case.discarded_tokens
    has_reasoning = case.completion.reasoning or received[0]["prompt"].endswith("<think>\n")  # ending it takes a token
    assert 0 < result.reasoning <= result.completion_tokens if has_reasoning else result.reasoning == 0
    completion = case.message if case.message and api_format == "messages" and not stream else case.completion
    assert result.completions == [completion] * (case.request.n or 1)
    for request in received:
        assert [text for text in case.in_prompt if text not in request["prompt"]] == []
        assert [text for text in case.not_in_prompt if text in request["prompt"]] == []
        assert case.seed in (None, request["sampling"]["seed"])
        assert [text for text in case.in_grammar if text not in request["grammar"]] == []
        assert [text for text in case.not_in_grammar if text in request["grammar"]] == []
        assert case.in_grammar or case.not_in_grammar or not request["grammar"]


def test_each_feature_documented_as_rejected_has_a_test_case() -> None:
    cases = {(api_format, name) for api_format in API_FORMATS for name in CASES} - UNSUPPORTED
    assert REJECTED.keys() <= cases
