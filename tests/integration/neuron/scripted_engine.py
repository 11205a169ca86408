"""An engine client whose outputs come from a test's script, with the real token stream and a byte tokenizer."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from helexa.core.errors import model_not_found
from helexa.core.node_reports import ModelInfo, ModelSpec
from helexa.neuron.engine.ipc.engine_options import EngineOptions
from helexa.neuron.engine.ipc.messages import (
    CachedPrefixes,
    DiskUse,
    Drafts,
    Embed,
    Generate,
    Ready,
    Timing,
    TokenOutput,
)
from helexa.neuron.engine_client.token_stream import TokenStream
from helexa.neuron.lifecycle.served_model_and_context_limit import ServedModel
from helexa.neuron.text.model_text import ModelText
from helexa.neuron.text.tokenizer import Tokenizer
from local_tokenizers import of_backend

MODEL = "Org/Scripted"
CONTEXT = 1024
TIMING = Timing(queue_ms=1.0, prefill_ms=12.0, decode_ms=34.0)

Say = Callable[..., None]
Script = Callable[[Generate, Say], Awaitable[None]]


def byte_tokenizer(*special: str) -> Tokenizer:
    """Return a tokenizer with one token per byte, the control tokens of ChatML and the tokens in `special`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({char: index for index, char in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    control = ("<|im_start|>", "<|im_end|>", *special)
    backend.add_special_tokens([AddedToken(token, special=True) for token in control])
    return of_backend(backend, eos_id=backend.token_to_id("<|im_end|>"))


# ChatML with Hermes' tool calls. With `enable_thinking`, the prompt ends inside a reasoning block.
AGENT_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    "{# calls look like <tool_call>\n{...}</tool_call>, thoughts like <think>...</think> #}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>\n"
    "{% for key, value in call.function.arguments.items() %}{{ key }}={{ value }};{% endfor %}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}<|im_start|>assistant\n{% if enable_thinking %}<think>\n{% endif %}"
)
TOKENIZER = byte_tokenizer()
END = TOKENIZER.eos_id or 0


def answer(text: str, *, finish: str = "stop", cached: int = 0, tokenizer: Tokenizer = TOKENIZER) -> Script:
    """Return a script that generates `text`, one byte per step, and ends. It reports `cached` cached prompt tokens."""

    async def script(request: Generate, say: Say) -> None:
        for index, token in enumerate(tokenizer.encode(text)):
            say(tokens=[token], cached_tokens=0 if index else cached)
            await asyncio.sleep(0)
        say(tokens=[END] if finish == "stop" else [], finish=finish, timing=TIMING)

    return script


def endless(text: str) -> Script:
    """Return a script that generates `text` and never ends."""

    async def script(request: Generate, say: Say) -> None:
        say(tokens=TOKENIZER.encode(text))
        await asyncio.Event().wait()

    return script


def failing(text: str, error: str) -> Script:
    """Return a script that generates `text` and fails with `error`."""

    async def script(request: Generate, say: Say) -> None:
        if text:
            say(tokens=TOKENIZER.encode(text))
            await asyncio.sleep(0)
        say(finish="error", error=error)

    return script


class ScriptedEngine:
    """A replacement for `EngineClient` that runs `script` for each request."""

    def __init__(self, script: Script, vocab_size: int = TOKENIZER.vocab_size, context: int = CONTEXT) -> None:
        self.script = script
        self.options = EngineOptions()
        self.ready = Ready(
            model_type="scripted",
            device="cpu",
            dtype="float32",
            kernels="none",
            context_length=context,
            vocab_size=vocab_size,
            kv_pages=context // 8,
            page_size=16,
            weight_bytes=1,
            kv_bytes=1,
        )
        self.alive = True
        self.missing_bytes = self.granted_bytes = 0
        self.running = self.waiting = self.prompt_tokens = self.cached_tokens = self.cached_prompts = 0
        self.disk = DiskUse()
        self.prefixes = CachedPrefixes()
        self.clears = 0
        self.encoded_images = self.reused_images = 0
        self.drafts = Drafts()
        self.free_pages = self.ready.kv_pages
        self.requests: list[Generate] = []
        self.submitted = asyncio.Event()
        self.cancelled = asyncio.Event()
        self._tasks: dict[int, asyncio.Task[None]] = {}

    async def clear_prefixes(self) -> None:
        self.clears += 1

    @property
    def open_streams(self) -> int:
        return len(self._tasks)

    def generate(self, prompt: list[int], wake_at: int = 1, **settings: Any) -> TokenStream:
        message = Generate(id=len(self.requests) + 1, prompt=prompt, **settings)
        self.requests.append(message)
        return TokenStream(self.submit, self.cancel, message, wake_at)  # type: ignore[arg-type]

    async def submit(self, stream: TokenStream, message: Generate | Embed) -> None:
        def say(**fields: object) -> None:
            output = TokenOutput(id=message.id, **fields)  # type: ignore[arg-type]
            if output.finish is not None:
                self._tasks.pop(message.id, None)
            stream.put(output)

        async def play() -> None:
            await self.script(message, say)

        self._tasks[message.id] = asyncio.create_task(play())
        self.submitted.set()

    def cancel(self, number: int) -> None:
        task = self._tasks.pop(number, None)
        if task is not None:
            task.cancel()
            self.cancelled.set()


class Registry:
    """A registry with one model."""

    def __init__(self, model: ServedModel) -> None:
        self.model = model

    def get(self, model_id: str) -> ServedModel:
        if model_id != self.model.id:
            raise model_not_found(model_id)
        return self.model

    def infos(self) -> list[ModelInfo]:
        return [self.model.info()]


def scripted_model(
    script: Script,
    *,
    template: str | None = None,
    defaults: dict[str, float | int] | None = None,
    tokenizer: Tokenizer = TOKENIZER,
    context: int = CONTEXT,
) -> ServedModel:
    """Return a served model whose engine runs `script` for each request."""
    engine: Any = ScriptedEngine(script, tokenizer.vocab_size, context)
    return ServedModel(MODEL, ModelSpec(model_id=MODEL), ModelText(tokenizer, template, defaults or {}), engine)
