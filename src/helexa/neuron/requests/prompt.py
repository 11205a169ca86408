"""A prompt of a chat, with its images."""

import asyncio
import binascii
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from helexa.core.errors import ApiError, invalid_body, overloaded, vision_unsupported
from helexa.core.wire.chat_message import IMAGE_PARTS, ChatMessage
from helexa.neuron.lifecycle.model import ServedModel
from helexa.neuron.text.templates.message_shaper import Message
from helexa.neuron.vision.image_error import ImageError, PixelMemoryError
from helexa.neuron.vision.prompt.image_range import ImageRange, expanded_index

if TYPE_CHECKING:
    from helexa.neuron.vision.model_vision import ModelVision
    from helexa.neuron.vision.preprocessing.image_sandbox import SharedImage

MAX_IMAGES = 128
"""Maximum number of images in a request."""

_BASE64 = ";base64"
_RETRY_AFTER_SECONDS = 2
_PARALLEL_IMAGES = 2  # the number of image workers; more would delay the images of other requests


class PromptImages(NamedTuple):
    """The images of a prompt.

    Attributes:
        images: pixels of the images, in the order of the prompt.
        ranges: the image tokens of the prompt.
    """

    images: "Sequence[SharedImage]" = ()
    ranges: Sequence[ImageRange] = ()

    @property
    def tokens(self) -> int:
        """Number of image tokens in the prompt."""
        return sum(image_range.length for image_range in self.ranges)


NO_IMAGES = PromptImages()


class Prompt(NamedTuple):
    """The prompt of a chat.

    Attributes:
        tokens: token ids of the prompt.
        turn: number of tokens before the last user message; 0 if unknown.
        images: the images of the prompt.
    """

    tokens: list[int]
    turn: int = 0
    images: PromptImages = NO_IMAGES


async def prepared_images(model: ServedModel, messages: Sequence[ChatMessage]) -> "list[SharedImage]":
    """Decode the images of a conversation, two at a time, and return their pixels in the order of the images.

    Raises:
        ApiError: 400: the model reads text only, or an image cannot be used. 503: the images of all requests need too
            much memory.
    """
    parts = [
        (part, f"messages.{number}.content.{index}")
        for number, message in enumerate(messages)
        if message.has_image and isinstance(message.content, list)
        for index, part in enumerate(message.content)
        if part["type"] in IMAGE_PARTS
    ]
    if not parts:
        return []
    if model.vision is None:
        raise vision_unsupported(model.id)
    if len(parts) > MAX_IMAGES:
        raise invalid_image(f"the request has {len(parts)} images, and the limit is {MAX_IMAGES}", "messages")
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
    """Decode the image of one image part.

    Raises:
        ApiError: see `prepared_images`.
    """
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
    turns: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None,
    variables: Mapping[str, Any],
    images: "Sequence[SharedImage]",
) -> Prompt:
    """Render messages with the model's chat template, and insert the tokens of images. Slow for long conversations.

    `Prompt.turn` is 0 for models without recurrent state, whose engines do not use it.

    Args:
        turns: the messages, as the chat template reads them.
        variables: variables of the chat template.
        images: the images of the messages.

    Raises:
        ApiError: 400: the text of a message contains a placeholder of images.
        TemplateError: the chat template cannot render the messages.
    """
    vision, layouts = model.vision, [image.layout for image in images]
    insert = None if vision is None or not images else lambda text, count: vision.insert(text, layouts[:count])
    try:
        if model.engine.ready.state_bytes:
            tokens, turn = model.text.prompt_and_turn_start(turns, tools, insert, **variables)
        else:
            tokens, turn = model.text.prompt_ids(turns, tools, insert, **variables), 0
        if vision is None or not images:
            return Prompt(tokens, turn)
        tokens, ranges = vision.expanded(tokens, layouts)
    except ImageError as error:
        raise invalid_image(str(error), "messages") from error
    if max(tokens) >= model.engine.ready.vocab_size:  # some models have no embedding of the image token
        for image_range in ranges:
            tokens[image_range.start : image_range.end] = [0] * image_range.length
    return Prompt(tokens, expanded_index(turn, ranges), PromptImages(images, ranges))


def invalid_image(message: str, param: str) -> ApiError:
    """Return the 400 error for an image that cannot be used."""
    return ApiError(400, "invalid_image", message, param=param)


def _source(part: Mapping[str, Any], field: str) -> tuple[str, str]:
    """Return the URL and the detail of an image part."""
    image = part.get("image_url") if part["type"] == "image_url" else None
    if not isinstance(image, Mapping) or not isinstance(image.get("url"), str):
        raise invalid_body(f"{field}: must be an 'image_url' with an object that has a 'url'", field)
    detail = image.get("detail")
    if not isinstance(detail, str | None):
        raise invalid_body(f"{field}.image_url.detail: must be a string", field)
    return image["url"], detail or "auto"


def _decoded(url: str, field: str) -> bytes:
    """Return the contents of a data URL with base64. The media type is ignored: the contents state the format."""
    head, comma, encoded = url.strip().partition(",")
    if head[:5].lower() != "data:":
        raise invalid_image(
            f"'{field}.image_url.url': the node reads only data URLs (data:image/png;base64,...)", field
        )
    if not comma or not head.lower().rstrip().endswith(_BASE64):
        raise invalid_image(f"'{field}.image_url.url': the data URL is not encoded as base64", field)
    try:
        data = binascii.a2b_base64("".join(encoded.split()), strict_mode=True)
    except ValueError as error:
        raise invalid_image(f"'{field}.image_url.url': invalid base64: {error}", field) from error
    if not data:
        raise invalid_image(f"'{field}.image_url.url': the data URL is empty", field)
    return data
