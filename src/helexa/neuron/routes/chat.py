"""Serve `POST /v1/chat/completions`, and render and run conversations for the other chat APIs."""

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.routing import Route

from helexa.core.errors import ApiError, unsupported_parameter
from helexa.core.wire.chat_message import ChatMessage
from helexa.core.wire.openai_chat import ChatRequest
from helexa.neuron.events import InferenceEvent
from helexa.neuron.lifecycle.model import ServedModel
from helexa.neuron.requests.answer_reader import AnswerForm
from helexa.neuron.requests.inference import run
from helexa.neuron.requests.output_constraint import chat_constraint, schemas_of
from helexa.neuron.requests.prompt import Prompt, prepared_images, rendered_prompt
from helexa.neuron.routes.body import read_json
from helexa.neuron.routes.principal import principal_of
from helexa.neuron.routes.projectors.chat_projector import ChatProjector
from helexa.neuron.routes.reply import RunResponse
from helexa.neuron.routes.usage import counts_prompt, reports_usage
from helexa.neuron.text.templates.chat_template import TemplateError

if TYPE_CHECKING:
    from helexa.neuron.vision.preprocessing.image_sandbox import SharedImage

_THINKING_HEADER = "x-include-thinking"
_THINKING_VARIABLES = ("enable_thinking", "thinking")  # names of the variable in chat templates


async def chat_completions(request: Request) -> RunResponse:
    """Handle `POST /v1/chat/completions`: return the model's answers to a conversation, streamed or as one body."""
    chat = ChatRequest.parse(await read_json(request))
    model: ServedModel = request.app.state.registry.get(chat.model)
    spelled = request.headers.get(_THINKING_HEADER, "").strip().lower() in ("1", "true", "yes")
    counts = chat.stream is True and counts_prompt(request)
    events = await converse(
        model, chat, principal_of(request), thinks=spelled, spelled_thoughts=spelled, counts_prompt=counts
    )
    client_usage = chat.includes_usage
    projector = ChatProjector(
        model.id, choices=chat.n or 1, include_usage=client_usage or reports_usage(request), null_usage=client_usage
    )
    return RunResponse(events, projector, stream=bool(chat.stream))


async def converse(
    model: ServedModel,
    chat: ChatRequest,
    principal: str,
    *,
    thinks: bool | None = None,
    spelled_thoughts: bool = False,
    counts_prompt: bool = False,
) -> AsyncGenerator[InferenceEvent, None]:
    """Return an iterator over the output events of the model's answers to a conversation.

    The events are independent of the API format.

    Args:
        model: the loaded model.
        chat: the request.
        principal: name of the request's principal (API key owner); empty for anonymous requests.
        thinks: whether the model reasons if the request does not set this; None to use the chat template's default.
        spelled_thoughts: whether to report reasoning as part of the answer's text.
        counts_prompt: whether to yield a `PromptCounted` event before the first output.

    Raises:
        ApiError: an image of the conversation cannot be used, the chat template cannot render the conversation, or the
            node does not support the structure that the request demands for the output.
    """
    tools = chat.offered_tools
    prompt = await rendered(model, chat, thinks=thinks)
    may_reason = chat.thinks(thinks) is not False
    constraint = await chat_constraint(model, chat, tools, prompt.tokens, may_reason)
    form = AnswerForm(
        schemas_of(tools),
        parallel=chat.parallel_tool_calls is not False,
        must_call=chat.must_call,
        spelled_thoughts=spelled_thoughts,
        thinking_budget=chat.max_reasoning_tokens,
        untagged_calls=chat.shape is None and not chat.must_call,
        structured=chat.shape is not None,
        may_reason=may_reason,
    )
    return run(
        model,
        [prompt.tokens],
        chat,
        form=form,
        constraint=constraint,
        principal=principal,
        turn=prompt.turn,
        images=prompt.images,
        counts_prompt=counts_prompt,
    )


async def rendered(model: ServedModel, chat: ChatRequest, *, thinks: bool | None = None) -> Prompt:
    """Render a conversation with the model's chat template and return the prompt.

    `Prompt.turn` is 0 for models without recurrent state, whose engines do not use it.

    Raises:
        ApiError: an image of the conversation cannot be used, or the chat template cannot render the conversation.
    """
    images = await prepared_images(model, chat.messages)
    variables = thinking_variables(model, chat.thinks(thinks)) | chat.template_variables
    # Tokenizing a long conversation takes time.
    return await asyncio.to_thread(_prompt, model, chat.messages, chat.offered_tools, variables, images)


def thinking_variables(model: ServedModel, thinks: bool | None) -> dict[str, Any]:
    """Return the chat template variables that switch reasoning on or off; none if `thinks` is None.

    The variables have the names that the model's chat template uses.
    """
    return (
        {} if thinks is None else {name: thinks for name in _THINKING_VARIABLES if model.text.template.mentions(name)}
    )


def _prompt(
    model: ServedModel,
    messages: Sequence[ChatMessage],
    tools: Sequence[Mapping[str, Any]],
    variables: Mapping[str, Any],
    images: "Sequence[SharedImage]",
) -> Prompt:
    if tools and not model.text.template.mentions("tools"):
        raise unsupported_parameter(
            "tools", f"model '{model.id}' does not support tools: its chat template does not use them"
        )
    turns = [message.for_template() for message in messages]
    try:
        return rendered_prompt(model, turns, tools, variables, images)
    except TemplateError as error:
        raise ApiError(422, "template_render_failed", str(error), param="messages") from error


routes = [Route("/v1/chat/completions", chat_completions, methods=["POST"])]
