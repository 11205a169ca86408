"""Answers with forced calls end at a call that repeats an earlier call, streamed and not."""

import json
from typing import Any

import pytest

from neuron.requests.test_chat_answers import AGENT, CALL, NEXT, both
from neuron.scripted_engine import AGENT_TEMPLATE, answer
from neuron.scripted_node import serve

FORCED: dict[str, Any] = {**AGENT, "tool_choice": "required"}
NEAR = CALL.replace("Köln", "Köln-Süd")
FAR = CALL.replace("Köln", "Kö")


def places(choice: dict[str, Any]) -> list[tuple[str, Any]]:
    functions = [call["function"] for call in choice["message"]["tool_calls"]]
    return [(function["name"], json.loads(function["arguments"]).get("place")) for function in functions]


@pytest.mark.parametrize(
    ("calls", "shown"),
    [
        ([CALL] * 5, [("weather", "Köln")]),
        ([CALL, NEXT, CALL, NEAR], [("weather", "Köln"), ("time", None)]),
        (
            [CALL, NEAR, FAR, NEXT, NEXT],
            [("weather", "Köln"), ("weather", "Köln-Süd"), ("weather", "Kö"), ("time", None)],
        ),
    ],
)
async def test_answer_with_forced_tool_calls_ends_before_the_first_repeated_call(
    calls: list[str], shown: list[tuple[str, Any]]
) -> None:
    async with serve(answer("\n".join([*calls, NEAR])), AGENT_TEMPLATE) as node:
        choice = (await both(node, FORCED))["choice"]
        assert places(choice) == shown
        assert choice["finish_reason"] == "tool_calls"
        assert node.engine.cancelled.is_set()


async def test_answer_with_forced_tool_calls_keeps_calls_that_differ() -> None:
    async with serve(answer(f"{CALL}\n{NEAR}\n{NEXT}"), AGENT_TEMPLATE) as node:
        choice = (await both(node, FORCED))["choice"]
        assert places(choice) == [("weather", "Köln"), ("weather", "Köln-Süd"), ("time", None)]


async def test_answer_with_optional_tool_calls_keeps_repeated_calls() -> None:
    async with serve(answer(f"{CALL}\n{CALL}"), AGENT_TEMPLATE) as node:
        assert places((await both(node, AGENT))["choice"]) == [("weather", "Köln")] * 2


async def test_tool_call_cut_off_by_the_output_limit_is_returned_incomplete() -> None:
    text = f"{CALL}\n{CALL[:60]}"
    async with serve(answer(text, finish="length"), AGENT_TEMPLATE) as node:
        choice = (await both(node, FORCED))["choice"]
        assert choice["finish_reason"] == "length"
        complete, cut = [call["function"]["arguments"] for call in choice["message"]["tool_calls"]]
        assert complete.startswith(cut) and cut
