"""`text_offset` of completions indexes the returned text, and control tokens end answers as stop strings."""

import asyncio
import json
from typing import Any

import pytest

from helexa.neuron.engine.ipc.messages import Generate
from neuron.scripted_engine import END, MODEL, TOKENIZER, Say, Script
from neuron.scripted_node import Node, serve

PATH = "/v1/completions"
START = TOKENIZER.encode("<|im_start|>")
ROCKET = TOKENIZER.encode("🚀")
(FIRST_OF_ROCKET, *_) = ROCKET


def tokens(ids: list[int], end: int | None = END) -> Script:
    """Return a script that scores the prompt, generates `ids` one by one, and ends with the token `end`."""

    async def script(request: Generate, say: Say) -> None:
        if request.prompt_logprobs is not None:
            say(prompt_logprobs=[(-1.0, [])] * (len(request.prompt) - 1))
        scored = request.sampling.logprobs is not None
        for token in ids:
            say(tokens=[token], logprobs=[(-1.0, [])] if scored else [])
            await asyncio.sleep(0)
        if end is not None:
            say(tokens=[end], logprobs=[(-1.0, [])] if scored else [], finish="stop")

    return script


async def complete(node: Node, **fields: Any) -> tuple[str, dict[str, list[Any]]]:
    """Return the text and the log-probabilities of a completion. The stream must have the same offsets."""
    body = {"model": MODEL, "prompt": "x", "logprobs": 0, "max_tokens": 64, **fields}
    status, reply = await node.post(PATH, body)
    assert status == 200, reply
    (choice,) = reply["choices"]
    parts = [json.loads(event)["choices"][0] for event in (await node.events(PATH, body))[:-1]]
    assert "".join(part["text"] for part in parts) == choice["text"]
    streamed = [offset for part in parts for offset in (part["logprobs"] or {}).get("text_offset", [])]
    assert streamed == choice["logprobs"]["text_offset"]
    return choice["text"], choice["logprobs"]


@pytest.mark.parametrize(
    ("ids", "text", "offsets"),
    [
        (TOKENIZER.encode("a🚀b"), "a🚀b", [0, 1, 1, 1, 1, 2]),
        (TOKENIZER.encode("é🚀"), "é🚀", [0, 0, 1, 1, 1, 1]),
        ([FIRST_OF_ROCKET, *TOKENIZER.encode("ab")], "\ufffdab", [0, 1, 2]),
        ([*TOKENIZER.encode("a"), *ROCKET[:3]], "a\ufffd", [0, 1, 1, 1]),
    ],
)
async def test_text_offsets_of_tokens_index_the_text_of_the_answer(
    ids: list[int], text: str, offsets: list[int]
) -> None:
    async with serve(tokens(ids)) as node:
        answer, logprobs = await complete(node)
    assert answer == text
    assert logprobs["text_offset"] == offsets


async def test_text_offsets_continue_after_control_tokens_and_incomplete_characters() -> None:
    async with serve(tokens([*TOKENIZER.encode("a"), *START, *ROCKET[:2]])) as node:
        answer, logprobs = await complete(node, echo=True, prompt="é")
    assert answer == "éa\ufffd"
    assert logprobs["tokens"][-1] == "<|im_end|>"
    assert logprobs["text_offset"] == [0, 0, 1, 2, 2, 2, 3]


async def test_text_offsets_before_a_stop_string_index_the_text() -> None:
    async with serve(tokens(TOKENIZER.encode("🚀ab!!c"))) as node:
        answer, logprobs = await complete(node, stop="b!!")
    assert answer == "🚀a"
    assert logprobs["text_offset"] == [0, 0, 0, 0, 1]


@pytest.mark.parametrize(
    ("prompt", "text", "offsets"),
    [
        ("<|im_start|>🚀a", "<|im_start|>🚀a", [0, 12, 12, 12, 12, 13]),
        ([START + ROCKET + TOKENIZER.encode("a")], "🚀a", [0, 0, 0, 0, 0, 1]),
    ],
)
async def test_text_offsets_of_an_echoed_prompt_index_the_prompt(prompt: Any, text: str, offsets: list[int]) -> None:
    async with serve(tokens(TOKENIZER.encode("é!"))) as node:
        answer, logprobs = await complete(node, prompt=prompt, echo=True)
    assert answer == f"{text}é!"
    end = len(text)
    assert logprobs["text_offset"] == [*offsets, end, end, end + 1, end + 2]


async def test_stop_string_that_is_the_text_of_a_control_token_ends_the_answer() -> None:
    async with serve(tokens([*TOKENIZER.encode("ab"), *START, *TOKENIZER.encode("more")])) as node:
        status, reply = await node.post(
            PATH, {"model": MODEL, "prompt": "x", "max_tokens": 64, "stop": ["<|im_start|>", "zz"]}
        )
    assert status == 200, reply
    (choice,) = reply["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("ab", "stop")
    assert reply["usage"]["completion_tokens"] == 3


async def test_end_token_given_as_a_stop_string_ends_the_answer_despite_ignore_eos() -> None:
    async with serve(tokens([*TOKENIZER.encode("ab"), END, *TOKENIZER.encode("more")], end=None)) as node:
        body = {"model": MODEL, "prompt": "x", "max_tokens": 64, "ignore_eos": True, "stop": "<|im_end|>"}
        status, reply = await node.post(PATH, body)
    assert status == 200, reply
    assert reply["choices"][0]["text"] == "ab"


async def test_control_token_as_stop_string_releases_text_held_for_another_stop_string() -> None:
    async with serve(tokens([*TOKENIZER.encode("ab"), *START, *TOKENIZER.encode("c")])) as node:
        answer, logprobs = await complete(node, stop=["bc", "<|im_start|>"])
    assert answer == "ab"
    assert logprobs["text_offset"] == [0, 1]
