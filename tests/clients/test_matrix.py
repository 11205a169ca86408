"""Every feature in every dialect, streamed and not, with the official clients, through a gateway and a node.

The model says exactly what a cell has it say. What a dialect has no word for is no cell.
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import anthropic
import openai
import pytest
import pytest_asyncio

from clients.dialects import DIALECTS, LEAST_BUDGET, Answer, Ask
from clients.saying_engine import say
from clients.saying_stack import SayingStack, saying_stack

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
CALLED = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
BROKEN = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": }}\n</tool_call>'
AGE = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"], "additionalProperties": False}


@dataclass(frozen=True)
class Cell:
    """What is asked, what comes of it, and what of it the engine must see.

    Attributes:
        seen, unseen: in the prompt.
        held, loose: in the grammar of the answer; it has none where both are empty.
        unsaid: how many tokens the engine says beyond the end of the answer; None where a cell does not tell.
        message: the answer as a whole message, which has no word for a call that broke off: it is text there.
    """

    ask: Ask
    answer: Answer
    seen: tuple[str, ...] = ()
    unseen: tuple[str, ...] = ()
    seed: int | None = None
    held: tuple[str, ...] = ()
    loose: tuple[str, ...] = ()
    unsaid: int | None = 0
    message: Answer | None = None


CELLS = {
    "plain": Cell(Ask(say("Grüße 🦊")), Answer("Grüße 🦊", reason="stop")),
    "tools": Cell(
        Ask(say(f"Adding.{CALLED}"), tools=(ADD,)),
        Answer("Adding.", calls=[CALL], reason="tool_calls"),
        seen=('"add"',),
    ),
    "two calls of tools": Cell(
        Ask(say(f"{CALLED}\n{CALLED}"), tools=(ADD,)), Answer(calls=[CALL, CALL], reason="tool_calls")
    ),
    "a tool's call that is none": Cell(
        Ask(say("<tool_call>\nadd them\n</tool_call>"), tools=(ADD,)),
        Answer("<tool_call>\nadd them\n</tool_call>", reason="stop"),
    ),
    "a tool's call whose arguments go wrong": Cell(
        Ask(say(f"So:{BROKEN}"), tools=(ADD,)),
        Answer("So:}}\n</tool_call>", calls=[("add", None)], reason="stop"),
        message=Answer('So:}}\n</tool_call>{"name":"add","arguments":"{\\"a\\": 1, \\"b\\": "}', reason="stop"),
    ),
    "a tool's call that ends in its arguments": Cell(
        Ask(say(f"So:{BROKEN[: BROKEN.index('}')]}"), tools=(ADD,)),
        Answer("So:", calls=[("add", None)], reason="stop"),
        message=Answer('So:{"name":"add","arguments":"{\\"a\\": 1, \\"b\\": "}', reason="stop"),
    ),
    "tools unused": Cell(Ask(say("No need."), tools=(ADD,)), Answer("No need.", reason="stop"), seen=('"add"',)),
    "forced tool": Cell(
        Ask(say(CALLED), tools=(ADD, SUBTRACT), forced="add"),
        Answer(calls=[CALL], reason="tool_calls"),
        held=("add",),
        loose=("subtract",),
    ),
    "a tool required": Cell(
        Ask(say(CALLED), tools=(ADD, SUBTRACT), choice="required"),
        Answer(calls=[CALL], reason="tool_calls"),
        held=("add", "subtract"),
    ),
    "no tool allowed": Cell(
        Ask(say(CALLED), tools=(ADD,), choice="none"), Answer(CALLED, reason="stop"), unseen=('"add"',)
    ),
    "one tool at a time": Cell(
        Ask(say(f"{CALLED}\n{CALLED}"), tools=(ADD,), parallel=False),
        Answer(calls=[CALL], reason="tool_calls"),
        unsaid=None,
    ),
    "tool history": Cell(
        Ask(say("Three."), tools=(ADD,), history=((CALL, "the sum is 3"),)),
        Answer("Three.", reason="stop"),
        seen=('"add"', '"a": 1', '"b": 2', "the sum is 3"),
    ),
    "thinking": Cell(
        Ask(say("<think>\nhm\n</think>\n\nYes."), thinking=True),
        Answer("Yes.", thought="hm", reason="stop"),
        seen=("<think>",),
    ),
    "thinking, then a tool": Cell(
        Ask(say(f"<think>\nhm\n</think>\n\n{CALLED}"), thinking=True, tools=(ADD,)),
        Answer(thought="hm", calls=[CALL], reason="tool_calls"),
    ),
    "thinking to its budget": Cell(
        Ask(say(f"<think>\n{'h' * 2000}\n</think>\n\nYes."), thinking=True, budget=LEAST_BUDGET, max_tokens=4000),
        Answer("Yes.", thought="h" * LEAST_BUDGET, reason="stop"),
        unsaid=None,
    ),
    "thinking, then a schema": Cell(
        Ask(say('<think>\nhm\n</think>\n\n{"age": 7}'), thinking=True, schema=AGE),
        Answer('{"age": 7}', thought="hm", reason="stop"),
        held=("age",),
    ),
    "thinking unasked": Cell(Ask(say("<think>hm</think>Yes.")), Answer("Yes.", thought="hm", reason="stop")),
    "no thinking": Cell(Ask(say("Yes."), thinking=False), Answer("Yes.", reason="stop"), ("<think>\n\n</think>\n\n",)),
    "truncated in thought": Cell(
        Ask(say("<think>\nhmmmm"), thinking=True, max_tokens=3),
        Answer(thought="hmm", reason="length"),
        seen=("<think>",),
    ),
    "truncated": Cell(Ask(say("too long"), max_tokens=3), Answer("too", reason="length")),
    "schema": Cell(Ask(say('{"age": 7}'), schema=AGE), Answer('{"age": 7}', reason="stop"), held=("age",)),
    "stop string": Cell(Ask(say("one END two"), stop="END"), Answer("one ", reason="stop"), unsaid=len(" two") + 1),
    "two answers": Cell(Ask(say("Yes."), n=2), Answer("Yes.", reason="stop")),
    "seed": Cell(Ask(say("Yes."), seed=7), Answer("Yes.", reason="stop"), seed=7),
}

# What a dialect has no word for.
NO_CELLS = {("completions", cell) for cell in CELLS if "tool" in cell or "think" in cell or "thought" in cell}

# What is refused: status, code, and what the message must name.
REFUSED: dict[tuple[str, str], tuple[int, str, str]] = {
    ("messages", "two answers"): (400, "invalid_anthropic_body", "n: is not a field of the Messages API"),
    ("responses", "two answers"): (400, "unsupported_parameter", "'n'"),
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[SayingStack]:
    async with saying_stack(tmp_path_factory.mktemp("saying")) as stack:
        yield stack


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    ("dialect", "name"),
    [(dialect, name) for dialect in DIALECTS for name in CELLS if (dialect, name) not in NO_CELLS],
)
@pytest.mark.asyncio(loop_scope="module")
async def test_a_cell(stack: SayingStack, dialect: str, name: str, stream: bool) -> None:
    cell, ask = CELLS[name], DIALECTS[dialect]
    if refusal := REFUSED.get((dialect, name)):
        status, code, words = refusal
        with pytest.raises((openai.APIStatusError, anthropic.APIStatusError), match=words) as refused:
            await ask(stack, cell.ask, stream=stream)
        body: Any = refused.value.body
        assert refused.value.status_code == status
        assert dialect == "messages" or body["code"] == code  # Anthropic's errors have no codes
        return
    before = len(stack.asked())
    reply = await ask(stack, cell.ask, stream=stream)
    asked = stack.asked()[before:]
    assert reply.prompt == asked[0]["prompt_tokens"]
    said = sum(request["said_tokens"] for request in asked)
    assert cell.unsaid is None or reply.said == said - cell.unsaid
    thought = cell.answer.thought or asked[0]["prompt"].endswith("<think>\n")  # which takes a token to end
    assert 0 < reply.thought <= reply.said if thought else reply.thought == 0
    answer = cell.message if cell.message and dialect == "messages" and not stream else cell.answer
    assert reply.answers == [answer] * (cell.ask.n or 1)
    for request in asked:
        assert [text for text in cell.seen if text not in request["prompt"]] == []
        assert [text for text in cell.unseen if text in request["prompt"]] == []
        assert cell.seed in (None, request["sampling"]["seed"])
        assert [text for text in cell.held if text not in request["grammar"]] == []
        assert [text for text in cell.loose if text in request["grammar"]] == []
        assert cell.held or cell.loose or not request["grammar"]


def test_what_is_refused_is_a_cell() -> None:
    cells = {(dialect, name) for dialect in DIALECTS for name in CELLS} - NO_CELLS
    assert REFUSED.keys() <= cells
