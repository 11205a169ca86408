"""Prompts at the limit of a model's context, through a real gateway and node with real tokenizers."""

import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import anthropic
import openai
import pytest
import tokenizers

from clients.scripted_stack import MODEL, SayingStack, saying_stack
from helexa.neuron.text.gguf_tokenizer import GgufTokenizer
from helexa.neuron.weights.gguf.files import GgufFile

CONTEXT = 8192
FITS = 7231
SAMPLE = 32
TEXTS = {
    "english": "A quick brown fox jumps over the lazy dog, and nobody is surprised. ",
    "digits": "31415926535897932384626433832795 ",
    "emoji": "🦊🎉👩‍🚀 ",
    "cjk": "大型语言模型可以处理很长的文本。",
    "whitespace": "\n" + " " * 40 + "return None",
    "dashes": "-" * 64 + "\n",
}


@pytest.fixture(scope="module", params=["deepseek_v4", "smollm2"])
def backend(request: pytest.FixtureRequest) -> tokenizers.Tokenizer:
    if request.param == "smollm2":
        return GgufTokenizer(GgufFile.open(request.getfixturevalue("smollm2_gguf")).metadata).backend
    return tokenizers.Tokenizer.from_file(str(request.getfixturevalue("deepseek_v4") / "tokenizer.json"))


@pytest.fixture
async def stack(tmp_path: Path, backend: tokenizers.Tokenizer) -> AsyncIterator[SayingStack]:
    environ = {"NEURON_HARNESS__TORCH__CONTEXT_LENGTH": str(CONTEXT)}
    async with saying_stack(tmp_path, backend, environ) as stack:
        yield stack


def chat(content: str) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": content}]}


async def count(stack: SayingStack, content: str) -> int:
    """Return the prompt's length in tokens, counted by the node."""
    async with aiohttp.ClientSession() as http, http.post(f"{stack.node_url}/tokenize", json=chat(content)) as response:
        return (await response.json())["count"]


async def content_of(stack: SayingStack, unit: str, tokens: int) -> str:
    """Return `unit` repeated until the prompt has at least `tokens` tokens, and only a few more."""
    tokens_of_unit = (await count(stack, unit * 2 * SAMPLE) - await count(stack, unit * SAMPLE)) / SAMPLE
    repeated, count_so_far = 0, 0
    while count_so_far < tokens:
        repeated += math.ceil((tokens - count_so_far) / tokens_of_unit)
        count_so_far = await count(stack, unit * repeated)
    return unit * repeated


async def test_each_api_accepts_a_prompt_within_the_context_and_rejects_a_longer_prompt(stack: SayingStack) -> None:
    for name, unit in TEXTS.items():
        content = await content_of(stack, unit, FITS)
        response = await stack.openai.chat.completions.create(**chat(content), max_tokens=1)
        assert response.usage is not None
        assert CONTEXT > response.usage.prompt_tokens == await count(stack, content) >= FITS, name

        content = await content_of(stack, unit, CONTEXT + 16)
        tokens = await count(stack, content)
        with pytest.raises(openai.BadRequestError, match=f"maximum context length is {CONTEXT} tokens") as caught:
            await stack.openai.chat.completions.create(**chat(content), max_tokens=1)
        assert (caught.value.code, caught.value.body["prompt_len"]) == ("context_length_exceeded", tokens), name  # type: ignore[index]
        assert f"resulted in {tokens} tokens" in str(caught.value)
        with pytest.raises(openai.BadRequestError, match=r"resulted in \d+ tokens"):
            await stack.openai.responses.create(model=MODEL, input=content, max_output_tokens=16)
        with pytest.raises(anthropic.BadRequestError, match=rf"prompt is too long: \d+ tokens > {CONTEXT} maximum"):
            await stack.anthropic.messages.create(**chat(content), max_tokens=1)  # type: ignore[arg-type]


async def test_huge_prompt_is_rejected_with_an_estimated_length(stack: SayingStack) -> None:
    content = "x" * (128 * CONTEXT)
    with pytest.raises(openai.BadRequestError, match="an estimated 262146 tokens") as caught:
        await stack.openai.chat.completions.create(**chat(content), max_tokens=1)
    body: Any = caught.value.body
    assert (body["code"], body["max"], body["estimated_prompt_tokens"]) == ("context_length_exceeded", CONTEXT, 262146)
    assert "prompt_len" not in body
    with pytest.raises(anthropic.BadRequestError, match=f"prompt is too long: about 262146 tokens > {CONTEXT} maximum"):
        await stack.anthropic.messages.create(model=MODEL, messages=chat(content)["messages"], max_tokens=1)
    assert stack.received_requests() == []
