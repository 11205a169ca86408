"""An endpoint that says what a script says, in all three wire APIs, on a real socket."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web


@dataclass(frozen=True)
class Call:
    """A tool call; arguments that are text are sent as they are."""

    name: str
    arguments: dict[str, Any] | str = field(default_factory=dict)
    id: str = ""

    @property
    def text(self) -> str:
        return self.arguments if isinstance(self.arguments, str) else json.dumps(self.arguments)


@dataclass(frozen=True)
class Answer:
    """One answer of the model.

    Attributes:
        hold: sent after the text, before the end: the stream stays open until it is set.
        refusal: an HTTP status and a body instead of an answer.
        finish: how it ends in the words of chat completions; None is `stop`, or `tool_calls` with calls.
        breaks: the connection breaks off after the text.
    """

    text: str = ""
    reasoning: str = ""
    calls: tuple[Call, ...] = ()
    input_tokens: int = 100
    output_tokens: int = 20
    hold: asyncio.Event | None = None
    refusal: tuple[int, dict[str, Any]] | None = None
    finish: str | None = None
    breaks: bool = False


Script = Callable[[list[dict[str, Any]]], Answer]


class ScriptedModel:
    """Answers in order; the last one is repeated. A function of the requests so far may stand for an answer.

    Attributes:
        requests: the bodies of what was asked, all wire APIs alike.
        hung_up: one item for each stream whose reader went away.
        listing: the list of models waits for it.
    """

    def __init__(self, *answers: Answer | Script, models: list[dict[str, Any]] | None = None) -> None:
        self.answers = list(answers)
        self.models = models or [{"id": "scripted", "object": "model", "context_length": 32768}]
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.hung_up: asyncio.Queue[float] = asyncio.Queue()
        self.listing = asyncio.Event()
        self.listing.set()
        self.url = ""

    @asynccontextmanager
    async def serving(self) -> AsyncIterator["ScriptedModel"]:
        app = web.Application(client_max_size=256 << 20)
        app.router.add_get("/v1/models", self._list)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/responses", self._responses)
        app.router.add_post("/v1/messages", self._messages)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        assert runner.addresses
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        try:
            yield self
        finally:
            await runner.cleanup()

    async def _next(self, request: web.Request) -> Answer:
        self.requests.append(await request.json())
        self.headers.append(dict(request.headers))
        answer = self.answers[min(len(self.requests), len(self.answers)) - 1]
        return answer if isinstance(answer, Answer) else answer(self.requests)

    async def _list(self, request: web.Request) -> web.Response:
        await self.listing.wait()
        return web.json_response({"object": "list", "data": self.models})

    async def _stream(
        self, request: web.Request, answer: Answer, before: list[str], after: list[str]
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        try:
            for event in before:
                await response.write(event.encode())
            if answer.breaks:
                assert request.transport is not None
                request.transport.close()
                return response
            if answer.hold is not None:
                await answer.hold.wait()
            for event in after:
                await response.write(event.encode())
        except (asyncio.CancelledError, ConnectionError):
            self.hung_up.put_nowait(asyncio.get_running_loop().time())
            raise
        return response

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        answer = await self._next(request)
        if answer.refusal:
            return web.json_response(answer.refusal[1], status=answer.refusal[0])
        number = len(self.requests)
        head = {"id": f"chatcmpl-{number}", "object": "chat.completion.chunk", "created": 0, "model": "scripted"}

        def chunk(delta: dict[str, Any], finish: str | None = None) -> str:
            return _data(head | {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]})

        before = [chunk({"role": "assistant", "content": ""})]
        before += [chunk({"reasoning_content": piece}) for piece in _pieces(answer.reasoning)]
        before += [chunk({"content": piece}) for piece in _pieces(answer.text)]
        after = []
        for index, call in enumerate(answer.calls):
            start = {"index": index, "id": _call_id(call, number, index), "type": "function"}
            after.append(chunk({"tool_calls": [start | {"function": {"name": call.name, "arguments": ""}}]}))
            after += [
                chunk({"tool_calls": [{"index": index, "function": {"arguments": piece}}]})
                for piece in _pieces(call.text)
            ]
        after.append(chunk({}, answer.finish or ("tool_calls" if answer.calls else "stop")))
        usage = {"prompt_tokens": answer.input_tokens, "completion_tokens": answer.output_tokens}
        usage["total_tokens"] = answer.input_tokens + answer.output_tokens
        after += [_data(head | {"choices": [], "usage": usage}), "data: [DONE]\n\n"]
        return await self._stream(request, answer, before, after)

    async def _responses(self, request: web.Request) -> web.StreamResponse:
        answer = await self._next(request)
        if answer.refusal:
            return web.json_response(answer.refusal[1], status=answer.refusal[0])
        number = len(self.requests)
        count = 0
        output: list[dict[str, Any]] = []

        def event(kind: str, **members: Any) -> str:
            nonlocal count
            count += 1
            return f"event: {kind}\n" + _data({"type": kind, "sequence_number": count, **members})

        response: dict[str, Any] = {
            "id": f"resp_{number}",
            "object": "response",
            "created_at": 0,
            "model": "scripted",
            "output": [],
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
            "status": "in_progress",
        }
        before = [event("response.created", response=response)]
        if answer.reasoning:
            id = f"rs_{number}"
            before += [
                event("response.reasoning_text.delta", item_id=id, output_index=0, content_index=0, delta=piece)
                for piece in _pieces(answer.reasoning)
            ]
            content = [{"type": "reasoning_text", "text": answer.reasoning}]
            output.append({"id": id, "type": "reasoning", "summary": [], "content": content})
            before.append(event("response.output_item.done", output_index=0, item=output[-1]))
        if answer.text:
            id, place = f"msg_{number}", len(output)
            item = {"id": id, "type": "message", "role": "assistant", "status": "in_progress", "content": []}
            before.append(event("response.output_item.added", output_index=place, item=item))
            before += [
                event(
                    "response.output_text.delta",
                    item_id=id,
                    output_index=place,
                    content_index=0,
                    delta=piece,
                    logprobs=[],
                )
                for piece in _pieces(answer.text)
            ]
            text = {"type": "output_text", "text": answer.text, "annotations": []}
            output.append(item | {"status": "completed", "content": [text]})
            before.append(event("response.output_item.done", output_index=place, item=output[-1]))
        after: list[str] = []
        for index, call in enumerate(answer.calls):
            place = len(output)
            item = {"id": f"fc_{number}_{index}", "type": "function_call", "status": "in_progress", "name": call.name}
            item |= {"call_id": _call_id(call, number, index), "arguments": ""}
            after.append(event("response.output_item.added", output_index=place, item=item))
            after += [
                event("response.function_call_arguments.delta", item_id=item["id"], output_index=place, delta=piece)
                for piece in _pieces(call.text)
            ]
            output.append(item | {"status": "completed", "arguments": call.text})
            after.append(event("response.output_item.done", output_index=place, item=output[-1]))
        usage = {"input_tokens": answer.input_tokens, "output_tokens": answer.output_tokens}
        usage |= {"total_tokens": answer.input_tokens + answer.output_tokens}
        usage |= {"input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}}
        done = response | {"output": output, "usage": usage, "status": "completed"}
        if answer.finish == "length":
            done |= {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
            after.append(event("response.incomplete", response=done))
        else:
            after.append(event("response.completed", response=done))
        return await self._stream(request, answer, before, after)

    async def _messages(self, request: web.Request) -> web.StreamResponse:
        answer = await self._next(request)
        if answer.refusal:
            return web.json_response(answer.refusal[1], status=answer.refusal[0])
        number = len(self.requests)
        index = 0

        def event(kind: str, **members: Any) -> str:
            return f"event: {kind}\n" + _data({"type": kind, **members})

        def block(start: dict[str, Any], deltas: list[dict[str, Any]]) -> list[str]:
            nonlocal index
            events = [event("content_block_start", index=index, content_block=start)]
            events += [event("content_block_delta", index=index, delta=delta) for delta in deltas]
            events.append(event("content_block_stop", index=index))
            index += 1
            return events

        message = {"id": f"msg_{number}", "type": "message", "role": "assistant", "model": "scripted", "content": []}
        message |= {"stop_reason": None, "stop_sequence": None}
        message |= {"usage": {"input_tokens": answer.input_tokens, "output_tokens": 1}}
        before = [event("message_start", message=message)]
        if answer.reasoning:
            deltas = [{"type": "thinking_delta", "thinking": piece} for piece in _pieces(answer.reasoning)]
            deltas.append({"type": "signature_delta", "signature": f"signed-{number}"})
            before += block({"type": "thinking", "thinking": "", "signature": ""}, deltas)
        if answer.text:
            deltas = [{"type": "text_delta", "text": piece} for piece in _pieces(answer.text)]
            before += block({"type": "text", "text": ""}, deltas)
        after: list[str] = []
        for place, call in enumerate(answer.calls):
            start = {"type": "tool_use", "id": _call_id(call, number, place), "name": call.name, "input": {}}
            deltas = [{"type": "input_json_delta", "partial_json": piece} for piece in _pieces(call.text)]
            after += block(start, deltas)
        finish = {"stop": "end_turn", "tool_calls": "tool_use", "length": "max_tokens", "content_filter": "refusal"}
        stop = finish[answer.finish or ("tool_calls" if answer.calls else "stop")]
        usage = {"input_tokens": answer.input_tokens, "output_tokens": answer.output_tokens}
        after.append(event("message_delta", delta={"stop_reason": stop, "stop_sequence": None}, usage=usage))
        after.append(event("message_stop"))
        return await self._stream(request, answer, before, after)


def _data(payload: dict[str, Any]) -> str:
    return f"data: {json.dumps(payload)}\n\n"


def _pieces(text: str) -> list[str]:
    size = max(7, len(text) // 50)
    return [text[start : start + size] for start in range(0, len(text), size)]


def _call_id(call: Call, number: int, index: int) -> str:
    return call.id or f"call_{number}_{index}"
