"""Prompts of chats: messages rendered with the chat template, and images."""

import asyncio
import binascii
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from helexa.core.errors import (
    ApiError,
    context_length_exceeded,
    invalid_body,
    overloaded,
    unsupported_parameter,
    vision_unsupported,
)
from helexa.core.logs import tell
from helexa.core.wire.usage_and_encoded_lists import CacheMiss
from helexa.neuron.engine.ipc.messages import PrefixMiss
from helexa.neuron.lifecycle.served_model_and_context_limit import ServedModel
from helexa.neuron.text.chat_template import TemplateError
from helexa.neuron.vision.image_tokens_and_errors import (
    ImageError,
    ImageRange,
    PixelMemoryError,
    expanded_index,
    unexpanded_tokens,
)

if TYPE_CHECKING:
    from helexa.core.wire.chat_message import ChatMessage
    from helexa.core.wire.openai_chat import ChatRequest
    from helexa.neuron.requests.text_chat import TextChat, TextMessage
    from helexa.neuron.vision.model_vision import ModelVision, SharedImage


_THINKING_VARIABLES = ("enable_thinking", "thinking")  # names, in different chat templates, of the reasoning switch

MAX_IMAGES = 128  # maximum number of images in a request

_BASE64 = ";base64"
_RETRY_AFTER_SECONDS = 2
_TOKENS_BEFORE_MISS, _TOKENS_AFTER_MISS = 8, 16
_PARALLEL_IMAGES = 2  # the number of image workers; more would delay the images of other requests

_prompt_log = logging.getLogger("helexa.neuron.prompts")
_prompt_log.disabled = True


class PromptImages(NamedTuple):
    """The images of a prompt."""

    images: "Sequence[SharedImage]" = ()
    ranges: Sequence[ImageRange] = ()

    @property
    def tokens(self) -> int:
        """Number of image tokens in the prompt."""
        return sum(image_range.length for image_range in self.ranges)


NO_IMAGES = PromptImages()


PartAt = Callable[[int], tuple[int | None, str]]
"""Function from the index of a prompt's token to the index of its message (None if unknown) and the message's role.

See `ModelText.part_at`. The function is slow for long conversations.
"""


class Prompt(NamedTuple):
    """The prompt of a chat."""

    tokens: list[int]
    turn: int = 0  # number of tokens before the last user message; 0 if unknown
    images: PromptImages = NO_IMAGES
    part_at: PartAt | None = None


async def chat_prompt(model: ServedModel, chat: "ChatRequest | TextChat", *, thinks: bool | None = None) -> Prompt:
    """Render a conversation with the model's chat template and return the prompt.

    `Prompt.turn` is 0 for models without recurrent state, because their engines do not use `turn`.

    Raises:
        ApiError: the conversation is too long, an image of the conversation cannot be used, or the chat template cannot
            render the conversation.
    """
    # Each message has at least one token. Rendering takes much longer than this check of the number of messages.
    if len(chat.messages) > model.context_length:
        raise context_length_exceeded(len(chat.messages), model.context_length)
    images = await prepared_images(model, chat.messages)
    variables = thinking_variables(model, chat.thinks(thinks)) | chat.template_variables
    # Tokenizing a long conversation takes time, so it runs in a thread.
    return await model.text.run(rendered_prompt, model, chat.messages, chat.offered_tools, variables, images)


def thinking_variables(model: ServedModel, thinks: bool | None) -> dict[str, Any]:
    """Return the template variables for reasoning; none if `thinks` is None."""
    return (
        {} if thinks is None else {name: thinks for name in _THINKING_VARIABLES if model.text.template.mentions(name)}
    )


async def prepared_images(model: ServedModel, messages: "Sequence[ChatMessage | TextMessage]") -> "list[SharedImage]":
    """Decode the images of a conversation; return their pixels in order.

    Raises:
        ApiError: 400: the model reads text only, or an image cannot be used. 503: the images of all requests need too
            much memory.
    """
    if not any(message.has_image for message in messages):
        return []
    from helexa.core.wire.chat_message import IMAGE_PARTS

    parts = [
        (part, f"messages.{number}.content.{index}")
        for number, message in enumerate(messages)
        if message.has_image and isinstance(message.content, list)
        for index, part in enumerate(message.content)
        if part["type"] in IMAGE_PARTS
    ]
    if model.vision is None:
        raise vision_unsupported(model.id)
    if len(parts) > MAX_IMAGES:
        raise invalid_image(
            f"the request has {len(parts)} images, and the limit is {MAX_IMAGES}; send fewer", "messages"
        )
    vision, remaining = model.vision, iter(enumerate(parts))
    images: dict[int, SharedImage] = {}
    errors: dict[int, ApiError] = {}

    async def prepare_remaining() -> None:
        for index, (part, field) in remaining:
            try:
                images[index] = await _prepared(vision, part, field)
            except ApiError as error:
                errors[index] = error
            if errors:
                return

    async with asyncio.TaskGroup() as tasks:
        for _ in range(_PARALLEL_IMAGES):
            tasks.create_task(prepare_remaining())
    if errors:
        raise errors[min(errors)]
    return [images[index] for index in range(len(parts))]


async def _prepared(vision: "ModelVision", part: Mapping[str, Any], field: str) -> "SharedImage":
    """Return the decoded image of a message's image part."""
    url, detail = _source(part, field)
    data = await asyncio.to_thread(_decoded, url, field)
    try:
        return await vision.prepare(data, detail)
    except PixelMemoryError as error:
        raise overloaded(str(error), _RETRY_AFTER_SECONDS) from error
    except ImageError as error:
        raise invalid_image(f"'{field}': {error}", field) from error


def rendered_prompt(
    model: ServedModel,
    messages: "Sequence[ChatMessage | TextMessage]",
    tools: Sequence[Mapping[str, Any]],
    variables: Mapping[str, Any],
    images: "Sequence[SharedImage]",
) -> Prompt:
    """Render messages and insert image tokens. Slow for long conversations.

    Raises:
        ApiError: 400: the chat template supports no tools, or the text of a message contains a placeholder of images.
            422: the chat template cannot render the messages.
    """
    if tools and not model.text.template.mentions("tools"):
        raise unsupported_parameter(
            "tools",
            f"model '{model.id}' does not support tools: its chat template does not use tools; choose another model",
        )
    turns = [message.for_template() for message in messages]
    vision, layouts = model.vision, [image.layout for image in images]
    insert = None if vision is None or not images else lambda text, count: vision.insert(text, layouts[:count])

    def part_at(tokens: list[int], position: int) -> tuple[int | None, str]:
        return model.text.part_at(tokens, position, turns, tools, insert, **variables)

    try:
        if model.engine.ready.state_bytes:
            tokens, turn = model.text.prompt_and_turn_start(turns, tools, insert, **variables)
        else:  # engines without recurrent state do not use the start of the last turn
            tokens, turn = model.text.prompt_ids(turns, tools, insert, **variables), 0
        if vision is None or not images:
            return Prompt(tokens, turn, part_at=lambda position: part_at(tokens, position))
        tokens, ranges = vision.expanded(tokens, layouts)
    except TemplateError as error:
        raise ApiError(422, "template_render_failed", str(error), param="messages") from error
    except ImageError as error:
        raise invalid_image(str(error), "messages") from error
    # Some models have no embedding for the id of the image token. Any valid id can replace it, because the engine takes
    # the embeddings at these positions from the image.
    if max(tokens) >= model.engine.ready.vocab_size:
        for image_range in ranges:
            tokens[image_range.start : image_range.end] = [0] * image_range.length

    def part_at_expanded(position: int) -> tuple[int | None, str]:
        return part_at(unexpanded_tokens(tokens, ranges), len(unexpanded_tokens(tokens[: position + 1], ranges)) - 1)

    return Prompt(tokens, expanded_index(turn, ranges), PromptImages(images, ranges), part_at_expanded)


def cache_miss(
    model: ServedModel, tokens: Sequence[int], missed: PrefixMiss, part_at: PartAt | None = None
) -> CacheMiss:
    """Describe for the client at which token of the prompt the prefix cache missed."""
    position = missed.position
    message, role = (None, "") if part_at is None else part_at(position)
    miss = CacheMiss(reason=missed.reason, position=position)
    if message is not None:
        miss["message"] = message
    if role:
        miss["role"] = role
    around = tokens[max(position - _TOKENS_BEFORE_MISS, 0) : position + _TOKENS_AFTER_MISS]
    miss["text"] = model.text.tokenizer.decode(around, skip_special=False)
    return miss


def invalid_image(message: str, param: str) -> ApiError:
    """Return the 400 error for an image in a prompt that cannot be used."""
    return ApiError(400, "invalid_image", message, param=param)


def _source(part: Mapping[str, Any], field: str) -> tuple[str, str]:
    """Return the URL and the detail level of a message's image part."""
    image = part.get("image_url") if part["type"] == "image_url" else None
    if not isinstance(image, Mapping) or not isinstance(image.get("url"), str):
        raise invalid_body(
            f"{field}: an image must have the type 'image_url' and an object 'image_url' with a 'url'", field
        )
    detail = image.get("detail")
    if not isinstance(detail, str | None):
        raise invalid_body(f"{field}.image_url.detail: must be a string, not {type(detail).__name__}", field)
    return image["url"], detail or "auto"


def _decoded(url: str, field: str) -> bytes:
    """Return the decoded bytes of a base64 data URL. The media type is ignored."""
    head, comma, encoded = url.strip().partition(",")
    if head[:5].lower() != "data:":
        raise invalid_image(
            f"'{field}.image_url.url': the node reads only data URLs; send the image as data:image/png;base64,...",
            field,
        )
    if not comma or not head.lower().rstrip().endswith(_BASE64):
        raise invalid_image(
            f"'{field}.image_url.url': the data URL is not encoded as base64; send data:image/png;base64,...", field
        )
    try:
        data = binascii.a2b_base64("".join(encoded.split()), strict_mode=True)
    except ValueError as error:
        raise invalid_image(
            f"'{field}.image_url.url': invalid base64: {error}; encode the image in base64 with padding", field
        ) from error
    if not data:
        raise invalid_image(f"'{field}.image_url.url': the data URL is empty; send data:image/png;base64,...", field)
    return data


def enable_prompt_log() -> None:
    """Log all prompts from now on, as the engine receives them."""
    # Prompts are private data of the clients, so only `[log] prompts` enables this log, never the log level alone.
    _prompt_log.disabled = False
    _prompt_log.warning("prompts are logged setting=log.prompts; this log contains the prompts of all clients")


def log_prompt(model: ServedModel, prompt: Sequence[int]) -> None:
    """Log the text of a prompt, if the log of prompts is enabled."""
    if _prompt_log.isEnabledFor(logging.INFO):
        text = model.text.tokenizer.decode(prompt, skip_special=False)
        tell(_prompt_log, logging.INFO, "prompt", model=model.id, tokens=len(prompt), text=text)
