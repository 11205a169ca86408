"""A real gateway and a real node with an engine that generates the text that the prompt prescribes."""

import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anthropic
import openai
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from cortex.fake_node import FakeNode
from cortex.running_gateway import running_cortex
from neuron.running_node import running
from ports import free_port

MODEL = "org/saying"

_ENGINE = (sys.executable, str(Path(__file__).with_name("scripted_engine.py")))
_SPECIAL = ("<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>")

# Qwen's template, with three cases of `enable_thinking`: true opens the block, false closes it, undefined omits it.
_TEMPLATE = r"""
{%- if tools %}
{{- '<|im_start|>system\n<tools>' }}
{%- for tool in tools %}{{ '\n' + (tool | tojson) }}{% endfor %}
{{- '\n</tools>\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call><|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\n' }}
{%- if message.reasoning_content %}{{ '<think>\n' + message.reasoning_content + '\n</think>\n\n' }}{% endif %}
{{- message.content or '' }}
{%- for call in message.tool_calls or [] %}
{{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) }}
{{- '}\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined %}{{ '<think>\n' if enable_thinking else '<think>\n\n</think>\n\n' }}{% endif %}
{%- endif %}
"""


@dataclass
class SayingStack:
    """The stack and the official clients. The clients never retry, so that tests see every failure."""

    url: str
    openai: openai.AsyncOpenAI
    anthropic: anthropic.AsyncAnthropic
    requests_file: Path
    node_url: str

    def received_requests(self) -> list[dict[str, Any]]:
        """Return the requests that the engine has received: their fields, prompt text and token counts."""
        return [json.loads(line) for line in self.requests_file.read_text().splitlines()]


def byte_tokenizer() -> tokenizers.Tokenizer:
    """Return a tokenizer with one token per byte."""
    letters = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = tokenizers.Tokenizer(models.BPE(letters, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def saying_model(folder: Path, backend: tokenizers.Tokenizer | None = None) -> Path:
    """Write a checkpoint without weights: Qwen's control tokens and a tokenizer, by default with one token per byte."""
    path = folder / "saying"
    path.mkdir()
    (path / "config.json").write_text("{}")
    backend = backend or byte_tokenizer()
    backend.add_special_tokens([AddedToken(token, special=True) for token in _SPECIAL[:2]])
    backend.add_tokens([AddedToken(token, special=False) for token in _SPECIAL[2:]])
    backend.save(str(path / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "chat_template": _TEMPLATE}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


@asynccontextmanager
async def saying_stack(
    folder: Path, backend: tokenizers.Tokenizer | None = None, environ: dict[str, str] | None = None
) -> AsyncIterator[SayingStack]:
    """Start the stack, load the model and yield the stack.

    Args:
        backend: the model's tokenizer; by default one token per byte.
        environ: additional environment variables of the node.
    """
    path = saying_model(folder, backend)
    options: dict[str, Any] = {"api_key": "any", "max_retries": 0}
    port = free_port()  # chosen in advance: the node reports its address to the gateway
    async with running({"NEURON_PORT": str(port), **(environ or {})}, _ENGINE, port=port) as node:
        assert await node.load(path, MODEL) == (200, {"status": "loaded"})
        async with (
            running_cortex(FakeNode(url=node.url)) as cortex,
            openai.AsyncOpenAI(
                base_url=f"{cortex.url}/v1", http_client=openai.DefaultAsyncHttpxClient(trust_env=False), **options
            ) as speaks_openai,
            anthropic.AsyncAnthropic(
                base_url=cortex.url, http_client=anthropic.DefaultAsyncHttpxClient(trust_env=False), **options
            ) as speaks_anthropic,
        ):
            yield SayingStack(cortex.url, speaks_openai, speaks_anthropic, path.with_suffix(".asked"), node.url)
