"""A model endpoint that says what a script says, in whichever of the three wire APIs it is asked, over real sockets."""

import asyncio
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

Json = dict[str, Any]


@dataclass(frozen=True)
class Say:
    """One answer.

    Attributes:
        calls: name and arguments each; a string stands for arguments as the model wrote them.
        tokens: of prompt and answer.
        finish: `stop`, `length` or `refusal`; calls make it a call.
        cut_after: pieces after which the connection is cut.
        hold_after: pieces after which nothing comes until the client hangs up.
    """

    text: str = ""
    thought: str = ""
    calls: tuple[tuple[str, Json | str], ...] = ()
    tokens: tuple[int, int] = (100, 10)
    cached: int = 0
    finish: str = "stop"
    cut_after: int | None = None
    hold_after: int | None = None


@dataclass(frozen=True)
class Refuse:
    """No answer, but an error."""

    status: int
    body: Any = ""
    headers: Json = field(default_factory=dict)


@dataclass(frozen=True)
class Asked:
    """What came in."""

    path: str
    body: Json
    headers: dict[str, str]

    @property
    def tools(self) -> list[str]:
        """Names, in order."""
        return [(tool.get("function") or tool)["name"] for tool in self.body.get("tools", ())]

    @property
    def conversation(self) -> list[tuple[str, ...]]:
        """The same for the same conversation in each API: (role, text), (`call`, name, arguments), (`result`, text)."""
        if "input" in self.body:
            return list(_of_items(self.body["input"]))
        return list(_of_messages(self.body["messages"]))

    @property
    def system(self) -> str:
        """The system prompt."""
        if "instructions" in self.body:
            return self.body["instructions"]
        return self.body.get("system") or next(
            (m["content"] for m in self.body["messages"] if m["role"] == "system"), ""
        )


class ScriptedEndpoint:
    """Answers each question with the next step of its script. As a context manager it listens at `url`."""

    def __init__(self, *script: Say | Refuse, models: Any = None) -> None:
        self.script = list(script)
        self.models = models if models is not None else {"object": "list", "data": [{"id": "scripted"}]}
        self.routes = set(_ENCODERS)
        self.asked: list[Asked] = []
        self.holding = asyncio.Event()  # an answer is being held
        self.hung_up = asyncio.Event()  # and its client is gone
        self.url = ""

    async def __aenter__(self) -> "ScriptedEndpoint":
        app = web.Application(client_max_size=1 << 28)
        app.router.add_get("/v1/models", self._list)
        for path in _ENCODERS:
            app.router.add_post(path, self._answer)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}/v1"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def _list(self, request: web.Request) -> web.Response:
        if isinstance(self.models, Refuse):
            return _refusal(self.models)
        return web.json_response(self.models)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if request.path not in self.routes:
            return _refusal(Refuse(404, "404 page not found"))
        if not body:
            return _refusal(Refuse(400, {"error": {"message": "model is required"}}))
        self.asked.append(Asked(request.path, body, {name.lower(): value for name, value in request.headers.items()}))
        step = self.script.pop(0) if self.script else Refuse(500, {"error": {"message": "the script is over"}})
        if isinstance(step, Refuse):
            return _refusal(step)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        try:
            for count, event in enumerate(_ENCODERS[request.path](step, str(len(self.asked)))):
                if count == step.cut_after:
                    assert request.transport is not None
                    request.transport.abort()
                    break
                if count == step.hold_after:
                    self.holding.set()
                    await asyncio.Event().wait()
                name = f"event: {event['type']}\n" if isinstance(event, dict) and "type" in event else ""
                data = event if isinstance(event, str) else json.dumps(event)
                await response.write(f"{name}data: {data}\n\n".encode())
        except asyncio.CancelledError:
            self.hung_up.set()
            raise
        return response


def _refusal(step: Refuse) -> web.Response:
    if isinstance(step.body, str):
        return web.Response(status=step.status, text=step.body, headers=step.headers)
    return web.json_response(step.body, status=step.status, headers=step.headers)


def _pieces(text: str) -> list[str]:
    return [text[at : at + 7] for at in range(0, len(text), 7)]


def _arguments(arguments: Json | str) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments)


def _chat(step: Say, id: str) -> Iterable[Json | str]:
    def chunk(delta: Json, finish: str | None = None) -> Json:
        return {"object": "chat.completion.chunk", "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}

    yield chunk({"role": "assistant", "content": ""})
    for piece in _pieces(step.thought):
        yield chunk({"reasoning_content": piece})
    for piece in _pieces(step.text):
        yield chunk({"content": piece})
    for index, (name, arguments) in enumerate(step.calls):
        yield chunk(
            {
                "tool_calls": [
                    {
                        "index": index,
                        "id": f"call_{id}_{index}",
                        "type": "function",
                        "function": {"name": name, "arguments": ""},
                    }
                ]
            }
        )
        for piece in _pieces(_arguments(arguments)):
            yield chunk({"tool_calls": [{"index": index, "function": {"arguments": piece}}]})
    finish = {"stop": "tool_calls" if step.calls else "stop", "refusal": "content_filter"}.get(step.finish, step.finish)
    yield chunk({}, finish)
    prompt, completion = step.tokens
    details = {"cached_tokens": step.cached}
    yield {
        "choices": [],
        "usage": {"prompt_tokens": prompt, "completion_tokens": completion, "prompt_tokens_details": details},
    }
    yield "[DONE]"


def _responses(step: Say, id: str) -> Iterable[Json]:
    yield {"type": "response.created", "response": {"id": f"resp_{id}", "status": "in_progress"}}
    for piece in _pieces(step.thought):
        yield {"type": "response.reasoning_text.delta", "output_index": 0, "delta": piece}
    for piece in _pieces(step.text):
        yield {"type": "response.output_text.delta", "output_index": 1, "delta": piece}
    for index, (name, arguments) in enumerate(step.calls):
        item = {"type": "function_call", "id": f"fc_{id}_{index}", "call_id": f"call_{id}_{index}", "name": name}
        where = {"output_index": index + 2, "item_id": item["id"]}
        yield {"type": "response.output_item.added", **where, "item": {**item, "arguments": ""}}
        for piece in _pieces(_arguments(arguments)):
            yield {"type": "response.function_call_arguments.delta", **where, "delta": piece}
        whole = _arguments(arguments)
        yield {"type": "response.function_call_arguments.done", **where, "arguments": whole}
        yield {"type": "response.output_item.done", **where, "item": {**item, "arguments": whole}}
    prompt, completion = step.tokens
    response: Json = {
        "status": "completed" if step.finish == "stop" else "incomplete",
        "usage": {
            "input_tokens": prompt,
            "output_tokens": completion,
            "input_tokens_details": {"cached_tokens": step.cached},
        },
    }
    if step.finish != "stop":
        response["incomplete_details"] = {
            "reason": {"length": "max_output_tokens", "refusal": "content_filter"}[step.finish]
        }
    yield {"type": f"response.{response['status']}", "response": response}


def _messages(step: Say, id: str) -> Iterable[Json]:
    prompt, completion = step.tokens
    usage = {"input_tokens": prompt - step.cached, "cache_read_input_tokens": step.cached, "output_tokens": 1}
    yield {"type": "message_start", "message": {"id": f"msg_{id}", "usage": usage}}
    yield {"type": "ping"}
    blocks: list[tuple[Json, str, str, str]] = []
    if step.thought:
        blocks.append(({"type": "thinking", "thinking": ""}, "thinking_delta", "thinking", step.thought))
    if step.text:
        blocks.append(({"type": "text", "text": ""}, "text_delta", "text", step.text))
    for index, (name, arguments) in enumerate(step.calls):
        block = {"type": "tool_use", "id": f"call_{id}_{index}", "name": name, "input": {}}
        blocks.append((block, "input_json_delta", "partial_json", _arguments(arguments)))
    for index, (block, kind, field_, text) in enumerate(blocks):
        yield {"type": "content_block_start", "index": index, "content_block": block}
        for piece in _pieces(text):
            yield {"type": "content_block_delta", "index": index, "delta": {"type": kind, field_: piece}}
        if block["type"] == "thinking":
            signed = {"type": "signature_delta", "signature": "signed"}
            yield {"type": "content_block_delta", "index": index, "delta": signed}
        yield {"type": "content_block_stop", "index": index}
    finish = {"stop": "tool_use" if step.calls else "end_turn", "length": "max_tokens"}.get(step.finish, step.finish)
    yield {"type": "message_delta", "delta": {"stop_reason": finish}, "usage": {"output_tokens": completion}}
    yield {"type": "message_stop"}


_ENCODERS: dict[str, Any] = {
    "/v1/chat/completions": _chat,
    "/v1/responses": _responses,
    "/v1/messages": _messages,
}

APIS = {
    "openai-chat": "/v1/chat/completions",
    "openai-responses": "/v1/responses",
    "anthropic-messages": "/v1/messages",
}


def _of_items(items: list[Json]) -> Iterable[tuple[str, ...]]:
    for item in items:
        if item["type"] == "message":
            for part in item["content"]:
                yield item["role"], part.get("text") or "image"
        elif item["type"] == "function_call":
            yield "call", item["name"], item["arguments"]
        elif item["type"] == "function_call_output":
            yield "result", item["output"]


def _of_messages(messages: list[Json]) -> Iterable[tuple[str, ...]]:
    for message in messages:
        content = message.get("content") or []
        if message["role"] == "tool":
            yield "result", content
            continue
        for block in [{"type": "text", "text": content}] if isinstance(content, str) else content:
            if block["type"] == "tool_use":
                yield "call", block["name"], json.dumps(block["input"])
            elif block["type"] == "tool_result":
                yield "result", block["content"]
            elif block["type"] == "text" and message["role"] != "system":
                yield message["role"], block["text"]
            elif block["type"] in ("image", "image_url"):
                yield message["role"], "image"
        for call in message.get("tool_calls", ()):
            yield "call", call["function"]["name"], call["function"]["arguments"]
