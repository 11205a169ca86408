"""Prompt lists, `echo` with log-probabilities, and `max_tokens: 0` at `/v1/completions`, with a scripted engine."""

import json
from typing import Any

import pytest

from helexa.neuron.engine.ipc.messages import Generate, Logprob
from neuron.scripted_engine import END, MODEL, TIMING, TOKENIZER, Say, answer
from neuron.scripted_node import Node, serve

PATH = "/v1/completions"
IDS = TOKENIZER.encode("ab")


async def scoring(request: Generate, say: Say) -> None:
    """Report the log-probability -n for the nth prompt token, generate a token without text, and end."""
    (alternative,) = TOKENIZER.encode("z")
    scores: list[Logprob] = [(-float(n), [(alternative, -0.5)]) for n in range(1, len(request.prompt))]
    if request.prompt_logprobs is not None:
        say(prompt_logprobs=scores[:1])  # as if from two prefill chunks
        say(prompt_logprobs=scores[1:], tokens=[])
    if not request.max_tokens:
        say(finish="length", timing=TIMING)
        return
    start = TOKENIZER.encode("<|im_start|>")
    say(tokens=start, logprobs=[(-8.0, [])] if request.sampling.logprobs is not None else [])
    say(tokens=[END], logprobs=[(-9.0, [])] if request.sampling.logprobs is not None else [], finish="stop")


async def choices(node: Node, **fields: Any) -> list[dict[str, Any]]:
    status, reply = await node.post(PATH, {"model": MODEL, **fields})
    assert status == 200, reply
    return reply["choices"]


async def test_request_as_sent_by_lm_eval_gets_the_log_probability_of_every_token() -> None:
    fields = {"prompt": [IDS], "echo": True, "logprobs": 1, "max_tokens": 2, "temperature": 0, "seed": 1234}
    async with serve(scoring) as node:
        (choice,) = await choices(node, **fields)
        (sent,) = node.engine.requests
    assert (sent.prompt, sent.max_tokens, sent.prompt_logprobs) == (IDS, 2, 1)
    logprobs = choice["logprobs"]
    assert choice["text"] == "ab"
    assert logprobs["tokens"] == ["a", "b", "<|im_start|>", "<|im_end|>"]
    assert logprobs["token_logprobs"] == [None, -1.0, -8.0, -9.0]
    assert logprobs["top_logprobs"] == [None, {"b": -1.0, "z": -0.5}, {"<|im_start|>": -8.0}, {"<|im_end|>": -9.0}]
    assert logprobs["text_offset"] == [0, 1, 2, 2]  # control tokens have no text


async def test_streamed_completion_has_the_log_probabilities_of_a_complete_answer() -> None:
    fields = {"prompt": "abc", "echo": True, "logprobs": 1, "max_tokens": 2}
    async with serve(scoring) as node:
        (complete,) = await choices(node, **fields)
        *data, done = await node.events(PATH, {"model": MODEL, **fields})
    assert done == "[DONE]"
    parts = [json.loads(one)["choices"][0] for one in data]
    assert "".join(part["text"] for part in parts) == complete["text"] == "abc"
    for name, values in complete["logprobs"].items():
        assert [value for part in parts if part["logprobs"] for value in part["logprobs"][name]] == values


@pytest.mark.parametrize("prompt", ["a", "abc"])
async def test_max_tokens_0_returns_only_the_scored_prompt(prompt: str) -> None:
    async with serve(scoring) as node:
        (choice,) = await choices(node, prompt=prompt, echo=True, logprobs=0, max_tokens=0)
        status, reply = await node.post(PATH, {"model": MODEL, "prompt": prompt, "max_tokens": 0})
    assert (choice["text"], choice["finish_reason"]) == (prompt, "length")
    assert choice["logprobs"]["token_logprobs"] == [None, -1.0, -2.0][: len(prompt)]
    assert (status, reply["choices"][0]["text"], reply["usage"]["completion_tokens"]) == (200, "", 0)


async def test_prompt_that_fills_the_whole_context_can_be_scored() -> None:
    async with serve(scoring, context=8) as node:
        (choice,) = await choices(node, prompt="a" * 8, echo=True, logprobs=0, max_tokens=0)
        assert (await node.error(PATH, {"model": MODEL, "prompt": "a" * 8, "max_tokens": 1}))[0] == 400
    assert len(choice["logprobs"]["tokens"]) == 8


@pytest.mark.parametrize(
    "prompts",
    [["one", "three"], [TOKENIZER.encode("one"), TOKENIZER.encode("three")], ["one", TOKENIZER.encode("three")]],
)
@pytest.mark.parametrize("n", [1, 2])
async def test_answers_to_a_list_of_prompts_have_the_order_of_the_prompts(prompts: list[Any], n: int) -> None:
    async def repeat(request: Generate, say: Say) -> None:
        await answer(TOKENIZER.decode(request.prompt).upper())(request, say)

    async with serve(repeat) as node:
        status, reply = await node.post(PATH, {"model": MODEL, "prompt": prompts, "echo": True, "n": n})
        parts: dict[int, str] = {}
        for data in (await node.events(PATH, {"model": MODEL, "prompt": prompts, "echo": True, "n": n}))[:-1]:
            for choice in json.loads(data)["choices"]:
                parts[choice["index"]] = parts.get(choice["index"], "") + choice["text"]
    assert status == 200
    expected = [text for text in ("oneONE", "threeTHREE") for _ in range(n)]
    assert [choice["text"] for choice in reply["choices"]] == expected
    assert [choice["index"] for choice in reply["choices"]] == list(range(2 * n))
    assert [parts[index] for index in sorted(parts)] == expected
    assert reply["usage"]["prompt_tokens"] == len("onethree")
    assert reply["usage"]["completion_tokens"] == n * (len("onethree") + 2)


async def test_prompts_of_a_list_are_computed_at_most_16_at_a_time() -> None:
    inside, most = 0, 0

    async def count(request: Generate, say: Say) -> None:
        nonlocal inside, most
        inside, most = inside + 1, max(most, inside + 1)
        await answer("x")(request, say)
        inside -= 1

    async with serve(count) as node:
        assert [choice["text"] for choice in await choices(node, prompt=["a"] * 128)] == ["x"] * 128
    assert most <= 16


async def test_echo_with_logprobs_scores_the_tokens_of_each_prompt_of_a_list() -> None:
    async with serve(scoring) as node:
        scored = await choices(node, prompt=["ab", "abc"], echo=True, logprobs=0, max_tokens=0)
    assert [one["logprobs"]["token_logprobs"] for one in scored] == [[None, -1.0], [None, -1.0, -2.0]]
