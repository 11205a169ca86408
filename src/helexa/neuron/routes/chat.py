"""`POST /v1/chat/completions`."""

import asyncio
from collections.abc import Sequence
from typing import Any

import orjson
from starlette.requests import Request
from starlette.routing import Route

from helexa.core.errors import ApiError, vision_unsupported
from helexa.core.sse import frame
from helexa.core.wire.openai_chat import (
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatMessage,
    ChatRequest,
    chat_completion,
)
from helexa.core.wire.usage import Usage
from helexa.neuron.inference import run
from helexa.neuron.model import ServedModel
from helexa.neuron.routes.body import read_json
from helexa.neuron.routes.principal import principal_of
from helexa.neuron.routes.projector import OpenAIProjector
from helexa.neuron.routes.reply import Reply
from helexa.neuron.text.chat_template import TemplateError


async def chat_completions(request: Request) -> Reply:
    """Answer a conversation."""
    chat = ChatRequest.parse(await read_json(request))
    model: ServedModel = request.app.state.registry.get(chat.model)
    if chat.has_image:
        raise vision_unsupported(model.id)
    # Long conversations take a while to cut into tokens.
    prompt, turn = await asyncio.to_thread(_prompt, model, chat)
    events = run(model, prompt, chat, principal=principal_of(request), turn=turn)
    return Reply(events, ChatProjector(model.id), stream=bool(chat.stream))


def template_turns(model: ServedModel, messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """A conversation as the model's chat template takes it."""
    turns = [message.for_template() for message in messages]
    if "developer" not in model.text.template.source:
        for turn in turns:  # OpenAI's newer name for the system's role, which most templates refuse
            if turn["role"] == "developer":
                turn["role"] = "system"
    return turns


def _prompt(model: ServedModel, chat: ChatRequest) -> tuple[list[int], int]:
    """The prompt, and where its last turn begins if the engine has a use for that."""
    turns = template_turns(model, chat.messages)
    variables = chat.chat_template_kwargs or {}
    try:
        if model.engine.ready.state_bytes:
            return model.text.prompt_and_turn_start(turns, **variables)
        return model.text.prompt_ids(turns, **variables), 0
    except TemplateError as error:
        raise ApiError(422, "template_render_failed", str(error), param="messages") from error


class ChatProjector(OpenAIProjector):
    """Renders a run as a chat completion, or as its chunks."""

    id_prefix = "chatcmpl"

    def opening(self) -> bytes:
        """The chunk that names the role."""
        return frame(orjson.dumps(self._chunk({"role": "assistant"}, None)))

    def chunk(self, text: str | None, finish_reason: str | None) -> ChatChunk:
        """A chunk with a piece of text, or with the finish reason."""
        return self._chunk({} if text is None else {"content": text}, finish_reason)

    def usage_chunk(self, usage: Usage) -> ChatChunk:
        """The chunk that carries the usage and no choices."""
        return {**self._chunk({}, None), "choices": [], "usage": usage}

    def whole(self, text: str, finish_reason: str, usage: Usage) -> ChatCompletion:
        """The chat completion."""
        return chat_completion(
            id=self.id, created=self.created, model=self.model, content=text, finish_reason=finish_reason, usage=usage
        )

    def _chunk(self, delta: ChatDelta, finish_reason: str | None) -> ChatChunk:
        return ChatChunk(
            id=self.id,
            object="chat.completion.chunk",
            created=self.created,
            model=self.model,
            choices=[ChatChunkChoice(index=0, delta=delta, finish_reason=finish_reason)],
        )


routes = [Route("/v1/chat/completions", chat_completions, methods=["POST"])]
