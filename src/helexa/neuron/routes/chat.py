"""Serve `POST /v1/chat/completions`."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from starlette.requests import Request
from starlette.routing import Route

from helexa.core.wire.openai_chat import (
    Alternative,
    ChatAnswer,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatRequest,
    ChatToken,
    FunctionDelta,
    ToolCall,
)
from helexa.core.wire.usage_and_encoded_lists import Encoded, Usage
from helexa.neuron.lifecycle.served_model_and_context_limit import ServedModel
from helexa.neuron.output_events import (
    Finished,
    OutputEvent,
    PromptScores,
    ReasoningDelta,
    Started,
    TextDelta,
    TokenLogprob,
    ToolCallDelta,
    ToolCallStart,
    WasReasoning,
)
from helexa.neuron.requests.inference import converse
from helexa.neuron.routes.answer_formats import OpenAIProjector
from helexa.neuron.routes.replies_disconnects_and_errors import (
    RunResponse,
    counts_prompt,
    principal_of,
    read_json,
    reports_usage,
)

_THINKING_HEADER = "x-include-thinking"


async def chat_completions(request: Request) -> RunResponse:
    """Handle `POST /v1/chat/completions`: answer a conversation."""
    chat = ChatRequest.parse(await read_json(request))
    model: ServedModel = request.app.state.registry.get(chat.model)
    spelled = request.headers.get(_THINKING_HEADER, "").strip().lower() in ("1", "true", "yes")
    counts = chat.stream is True and counts_prompt(request)
    events = await converse(
        model, chat, principal_of(request), thinks=spelled, spelled_thoughts=spelled, counts_prompt=counts
    )
    # A gateway requests the token counts with a header, to charge its budgets. Only if the client itself requests
    # `usage` do the other chunks have `usage: null`.
    client_usage = chat.includes_usage
    projector = ChatProjector(
        model.id, choices=chat.n or 1, include_usage=client_usage or reports_usage(request), null_usage=client_usage
    )
    return RunResponse(events, projector, stream=bool(chat.stream))


class ChatProjector(OpenAIProjector):
    """Converts output events to a chat completion, as one body or chunks."""

    id_prefix = "chatcmpl"

    @cached_property
    def _tokens(self) -> list[Encoded]:
        """Each answer's log-probabilities as encoded JSON, for the body."""
        return [Encoded() for _ in range(self.choices)]

    def chunk(self, choice: int, event: Started | OutputEvent | Finished) -> ChatChunk | None:
        """Return the chunk for an event of answer `choice`; None for `WasReasoning`."""
        # `WasReasoning` means that the text so far was reasoning. The chunks with this text are sent already.
        if isinstance(event, WasReasoning):
            return None
        reason = event.reason if isinstance(event, Finished) else None
        chunk_choice = ChatChunkChoice(index=choice, delta=_delta(event), finish_reason=reason)
        if isinstance(event, TextDelta) and event.logprobs:
            tokens = Encoded()
            _add(event.logprobs, tokens)
            chunk_choice["logprobs"] = ChatLogprobs(content=tokens.fragment(), refusal=None)
        return self._chunk([chunk_choice])

    def usage_chunk(self, usage: Usage) -> ChatChunk:
        """Return the last chunk, with the token counts `usage` and no choices."""
        return {**self._chunk([]), "usage": usage}

    def keep_logprobs(self, choice: int, tokens: Sequence[TokenLogprob]) -> None:
        """Record the log-probabilities of the next tokens of answer `choice` for the body."""
        _add(tokens, self._tokens[choice])

    def _take(self, choice: int, event: OutputEvent) -> None:
        # Discard the log-probabilities so far, because they belong to text that has turned out to be reasoning.
        if isinstance(event, WasReasoning):
            self._tokens[choice] = Encoded()
        super()._take(choice, event)

    def choice(self, index: int, events: Sequence[OutputEvent], end: Finished) -> ChatChoice:
        """Return the complete answer `index`, an element of `choices` in the body."""
        text: list[str] = []
        thoughts: list[str] = []
        calls: list[ToolCall] = []
        arguments: list[list[str]] = []
        for event in events:
            match event:
                case TextDelta(piece):
                    text.append(piece)
                case ReasoningDelta(piece):
                    thoughts.append(piece)
                case WasReasoning():
                    thoughts += text
                    text.clear()
                case ToolCallStart(_, id, name):
                    calls.append(ToolCall(id=id, type="function", function={"name": name, "arguments": ""}))
                    arguments.append([])
                case ToolCallDelta(number, piece):
                    arguments[number].append(piece)
        for call, pieces in zip(calls, arguments, strict=True):
            call["function"]["arguments"] = "".join(pieces)
        # As in OpenAI's API, the content of an answer without text is null if there are tool calls, and "" otherwise.
        message = ChatAnswer(role="assistant", content="".join(text) or (None if calls else ""), refusal=None)
        if thoughts:
            message["reasoning_content"] = "".join(thoughts)
        if calls:
            message["tool_calls"] = calls
        tokens = self._tokens[index]
        logprobs = ChatLogprobs(content=tokens.fragment(), refusal=None) if tokens else None
        return ChatChoice(index=index, message=message, logprobs=logprobs, finish_reason=end.reason)

    def complete_body(self, choices: Sequence[Any], usage: Usage) -> ChatCompletion:
        """Return the body with the answers `choices` and the token counts `usage`."""
        return ChatCompletion(
            id=self.id,
            object="chat.completion",
            created=self.created,
            model=self.model,
            choices=list(choices),
            usage=usage,
        )

    def _chunk(self, choices: list[ChatChunkChoice]) -> ChatChunk:
        return ChatChunk(
            id=self.id, object="chat.completion.chunk", created=self.created, model=self.model, choices=choices
        )


def _delta(event: Started | OutputEvent | Finished) -> ChatDelta:
    match event:
        case Started():
            return {"role": "assistant"}
        case TextDelta(text):
            return {"content": text}
        case ReasoningDelta(text):
            return {"reasoning_content": text}
        case ToolCallStart(index, id, name):
            function = FunctionDelta(name=name, arguments="")
            return {"tool_calls": [{"index": index, "id": id, "type": "function", "function": function}]}
        case ToolCallDelta(index, arguments):
            return {"tool_calls": [{"index": index, "function": {"arguments": arguments}}]}
        case Finished() | WasReasoning() | PromptScores():
            return {}


def _add(tokens: Sequence[TokenLogprob], encoded: Encoded) -> None:
    def alternative(token: str, spelled: bytes, logprob: float) -> Alternative:
        return Alternative(token=token, logprob=logprob, bytes=list(spelled))

    for entry in tokens:
        top = [alternative(*candidate) for candidate in entry.top]
        encoded.add(ChatToken(**alternative(entry.token, entry.bytes, entry.logprob), top_logprobs=top))


routes = [Route("/v1/chat/completions", chat_completions, methods=["POST"])]
