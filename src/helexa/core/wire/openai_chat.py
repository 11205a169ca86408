"""OpenAI chat completions: the request, and the shapes of the answer."""

from typing import Annotated, Any, Literal, NotRequired, TypedDict

from pydantic import Field, PlainValidator
from pydantic_core import PydanticCustomError

from helexa.core.errors import unsupported_parameter
from helexa.core.wire.generation import GenerationRequest
from helexa.core.wire.request import WireObject
from helexa.core.wire.usage import Usage

IMAGE_PARTS = frozenset({"image_url", "input_image", "image"})

_TEXT_PARTS = frozenset({"text", "refusal"})  # each holds its text under the name of its type
_Content = str | list[dict[str, Any]] | None
_TEMPLATE_ARGUMENTS = ("messages", "tools")


def _content(value: Any) -> Any:
    """Accept a string, null, or a list of text and image parts."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise PydanticCustomError("content", "must be a string, a list of parts or null")
    for index, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str):
            raise PydanticCustomError("content", "part {index} is not an object with a 'type'", {"index": index})
        if kind in IMAGE_PARTS:
            continue
        if kind not in _TEXT_PARTS:
            raise PydanticCustomError(
                "content", "part {index} is of unknown type '{kind}'", {"index": index, "kind": kind[:100]}
            )
        if not isinstance(part.get(kind), str):
            raise PydanticCustomError("content", "part {index} has no '{kind}' string", {"index": index, "kind": kind})
    return value


class ChatMessage(WireObject):
    """One turn. What else it carries (`name`, `tool_calls`, `tool_call_id`, ...) is kept for the chat template."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[_Content, PlainValidator(_content, json_schema_input_type=_Content)] = None

    @property
    def has_image(self) -> bool:
        """Whether a part of the content is an image."""
        return isinstance(self.content, list) and any(part["type"] in IMAGE_PARTS for part in self.content)

    def for_template(self) -> dict[str, Any]:
        """The turn as a chat template sees it: a replayed refusal is text, null fields are left out."""
        content = self.content
        if isinstance(content, list):
            content = [
                {"type": "text", "text": part["refusal"]} if part["type"] == "refusal" else part for part in content
            ]
        extras = {key: value for key, value in (self.model_extra or {}).items() if value is not None}
        return {"role": self.role, "content": content, **extras}


class ChatRequest(GenerationRequest):
    """The body of `POST /v1/chat/completions`."""

    messages: list[ChatMessage] = Field(min_length=1)
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None

    @property
    def has_image(self) -> bool:
        """Whether any turn contains an image."""
        return any(message.has_image for message in self.messages)

    def refuse_unsupported(self) -> None:
        """Refuse tools, log probabilities, structured output and anything that is not text, by name."""
        super().refuse_unsupported()
        if self.tools and self.tool_choice != "none":
            raise unsupported_parameter("tools")
        if self.tool_choice not in (None, "none", "auto"):
            raise unsupported_parameter("tool_choice")
        for name in ("functions", "logprobs", "top_logprobs", "audio", "web_search_options"):
            self.refuse(name)
        self.refuse("function_call", ("none", "auto"))
        self.refuse("response_format", ({"type": "text"},))
        self.refuse("modalities", (["text"],))
        for name in _TEMPLATE_ARGUMENTS:
            if name in (self.chat_template_kwargs or {}):
                raise unsupported_parameter(
                    f"chat_template_kwargs.{name}", f"'{name}' cannot be set through chat_template_kwargs"
                )


class ChatAnswer(TypedDict):
    """The assistant's turn."""

    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(TypedDict):
    """One answer."""

    index: int
    message: ChatAnswer
    logprobs: None
    finish_reason: str
    stop_reason: NotRequired[str]


class ChatCompletion(TypedDict):
    """The body of a reply that is not streamed."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class ChatDelta(TypedDict, total=False):
    """What a chunk adds to the assistant's turn."""

    role: Literal["assistant"]
    content: str


class ChatChunkChoice(TypedDict):
    """One answer's part of a chunk."""

    index: int
    delta: ChatDelta
    finish_reason: str | None
    stop_reason: NotRequired[str]


class ChatChunk(TypedDict):
    """One event of a streamed reply. The one with `usage` has no choices."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: NotRequired[Usage]


def chat_completion(
    *, id: str, created: int, model: str, content: str, finish_reason: str, usage: Usage
) -> ChatCompletion:
    """Build a reply that is not streamed."""
    return ChatCompletion(
        id=id,
        object="chat.completion",
        created=created,
        model=model,
        choices=[
            ChatChoice(
                index=0,
                message=ChatAnswer(role="assistant", content=content, refusal=None),
                logprobs=None,
                finish_reason=finish_reason,
            )
        ],
        usage=usage,
    )
