"""Bodies of `POST /tokenize`, `POST /detokenize` and `GET /tokenizer_info`, compatible with vLLM."""

from typing import Any, NotRequired, TypedDict

from pydantic import Field

from helexa.core.errors import invalid_body, unsupported_parameter
from helexa.core.wire.chat_message import ChatMessage
from helexa.core.wire.openai_chat import both_endings
from helexa.core.wire.request import WireRequest


class TokenizeRequest(WireRequest):
    """The body of `POST /tokenize`: a text (`prompt`) or a conversation (`messages`) to tokenize."""

    prompt: str | None = None
    messages: list[ChatMessage] | None = Field(None, min_length=1)
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    @property
    def has_image(self) -> bool:
        """Whether a message contains an image."""
        return any(message.has_image for message in self.messages or ())

    def reject_unsupported(self) -> None:
        """Raise an error if both or neither of `prompt` and `messages` are set, or if a parameter is not supported."""
        if (self.prompt is None) == (self.messages is None):
            raise invalid_body("exactly one of 'prompt' and 'messages' is required")
        if self.continue_final_message and self.add_generation_prompt:
            if "add_generation_prompt" in self.model_fields_set:
                raise both_endings()
            self.add_generation_prompt = False
        if self.messages is not None and self.add_special_tokens:
            raise unsupported_parameter("add_special_tokens", "a chat template writes special tokens itself")
        if self.extra("chat_template"):
            raise unsupported_parameter("chat_template")
        for name in ("messages", "tools"):
            if name in (self.chat_template_kwargs or {}):
                raise unsupported_parameter(f"chat_template_kwargs.{name}")


class DetokenizeRequest(WireRequest):
    """The body of `POST /detokenize`: token ids to convert to text."""

    tokens: list[int]


class Tokens(TypedDict):
    """The response of `POST /tokenize`. If requested, `token_strs` contains each token as written in the vocabulary."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: NotRequired[list[str | None]]


class Detokenized(TypedDict):
    """The response of `POST /detokenize`. `prompt` is the text of all tokens, including control tokens."""

    prompt: str
