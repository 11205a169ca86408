"""Converts requests for models that write tool calls as text, and extracts calls and reasoning from responses."""

import dataclasses
import json
from collections.abc import Iterator

from helexa.acp.history import AssistantMessage, Message, Text, ToolResult, UserMessage
from helexa.acp.providers import markers
from helexa.acp.providers.markers import MarkerParser, Segment, Thought, UnparsedCall
from helexa.acp.providers.provider import AnswerDelta, CallDelta, End, ModelEvent, ModelRequest, ReasoningDelta
from helexa.acp.providers.repair import MalformedCall, ParsedCall, repair


def with_written_calls(request: ModelRequest) -> ModelRequest:
    """Convert a request for an endpoint without native tool calls.

    In the returned request, the system prompt describes the tools. The messages contain tool calls and results as text.
    """
    tools = {tool.name: (tool.description, tool.schema) for tool in request.tools}
    return dataclasses.replace(
        request,
        system=f"{request.system}\n\n{markers.instructions(tools)}".strip(),
        messages=[_written(message) for message in request.messages],
        tools=(),
    )


def _written(message: Message) -> Message:
    if isinstance(message, AssistantMessage) and message.calls:
        calls = [markers.written_call(call.name, call.arguments) for call in message.calls]
        return AssistantMessage(message.id, "\n".join([message.text, *calls] if message.text else calls))
    if isinstance(message, ToolResult):
        return UserMessage(message.call_id, (Text(markers.written_result(message.content)), *message.images))
    return message


class MarkerReader:
    """Extracts tool calls and reasoning that the model wrote between markers in the text of its response.

    Args:
        request: the original request with its tools.
        calls_requested: whether the prompt asks the model to write tool calls as text. If False, text between markers
            counts as a tool call only under three conditions: the text is a valid call, it is not in a code block, and
            the response has no native tool calls.
    """

    def __init__(self, request: ModelRequest, *, calls_requested: bool) -> None:
        self._schemas = {tool.name: tool.schema for tool in request.tools}
        self._calls_requested = calls_requested
        self._parser = MarkerParser(fences=not calls_requested)
        self._has_native_calls = False
        self._call_count = 0
        self._doubtful: list[tuple[UnparsedCall, ParsedCall]] = []

    def read(self, event: ModelEvent) -> Iterator[ModelEvent]:
        """Yield the events for one event of the response.

        A text chunk is split into text, reasoning and tool calls, each as a separate event. Other events are yielded
        unchanged.
        """
        match event:
            case AnswerDelta(text):
                yield from self._events(self._parser.feed(text))
            case End(reason, extras):
                yield from self._events(self._parser.finish())
                for unparsed, call in self._doubtful:
                    yield AnswerDelta(unparsed.verbatim) if self._has_native_calls else self._call(call)
                yield End("tool_calls" if self._call_count and reason == "stop" else reason, extras)
            case _:
                self._has_native_calls = self._has_native_calls or isinstance(event, CallDelta)
                yield event

    def _events(self, segments: list[Segment]) -> Iterator[ModelEvent]:
        for segment in segments:
            match segment:
                case UnparsedCall():
                    yield from self._unparsed_call(segment)
                case Thought(text):
                    yield ReasoningDelta(text)
                case _:
                    yield AnswerDelta(segment.text)

    def _unparsed_call(self, unparsed: UnparsedCall) -> Iterator[ModelEvent]:
        if not unparsed.text.strip():
            return
        call = repair("", unparsed.text, self._schemas)
        if self._calls_requested:
            yield self._call(call, unparsed.text)
        elif isinstance(call, ParsedCall) and call.name in self._schemas:
            self._doubtful.append((unparsed, call))
        else:
            yield AnswerDelta(unparsed.verbatim)

    def _call(self, call: ParsedCall | MalformedCall, text: str = "") -> CallDelta:
        index, self._call_count = self._call_count, self._call_count + 1
        if isinstance(call, MalformedCall):
            return CallDelta(index, arguments=text)
        return CallDelta(index, name=call.name, arguments=json.dumps(call.arguments, ensure_ascii=False))
