"""A prompt with its options, in the form that servers and private engines accept."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from helexa.generation.errors import InvalidRequestError
from helexa.generation.images import with_images
from helexa.generation.sampling import Sampling
from helexa.generation.schema import AnswerSchema

Message = Mapping[str, Any]
"""A message of a conversation, `{"role": "user", "content": "..."}`, as in OpenAI's chat API."""

Prompt = str | Sequence[Message]
"""The text of a user message, or the messages of a conversation."""

_SEEDS = 1 << 31  # seeds that every server accepts


@dataclass(frozen=True, slots=True)
class Ask:
    """The options of a library call, which are the same for all prompts of the call.

    Attributes:
        sampling: sampling options.
        system: system prompt, which is put before each prompt, or None.
        schema: JSON Schema that constrains each response, or None.
        think: whether the model reasons before its response. None selects the model's default.
        images: content parts of the images that are put before each prompt.
    """

    sampling: Sampling = field(default_factory=Sampling)
    system: str | None = None
    schema: AnswerSchema | None = None
    think: bool | None = None
    images: tuple[dict[str, Any], ...] = ()

    def request(self, prompt: Prompt, number: int = 0) -> "Request":
        """Return a request with `prompt` and these options.

        The seed of the request is the seed in `sampling` plus `number`. If `sampling` has no seed, the seed is random.

        Args:
            prompt: text or messages.
            number: index of the request among the requests of one call.

        Raises:
            InvalidRequestError: the prompt is invalid.
        """
        messages = with_images(_messages(prompt), self.images)
        if self.system is not None:
            messages.insert(0, {"role": "system", "content": self.system})
        base_seed = self.sampling.seed
        seed = secrets.randbelow(_SEEDS) if base_seed is None else base_seed + number
        return Request(messages, replace(self.sampling, seed=seed), seed, self.schema, self.think)


@dataclass(frozen=True, slots=True)
class Request:
    """A request for one response: the messages of a conversation, and the options of generation.

    Attributes:
        messages: messages of the conversation.
        sampling: sampling options.
        seed: random seed, which is also contained in `sampling`.
        schema: JSON Schema that constrains the response, or None.
        think: whether the model reasons before its response. None selects the model's default.
        streamed: whether the response is streamed during generation.
    """

    messages: list[dict[str, Any]]
    sampling: Sampling
    seed: int
    schema: AnswerSchema | None = None
    think: bool | None = None
    streamed: bool = False

    def body(self, model: str) -> dict[str, Any]:
        """Return the JSON body of an OpenAI chat completion request to `model`."""
        body = {"model": model, "messages": self.messages, "stream": self.streamed, **self.sampling.body()}
        if self.schema is not None:
            body["response_format"] = self.schema.response_format
        if self.think is not None:
            body["enable_thinking"] = self.think
        return body


def _messages(prompt: Any) -> list[dict[str, Any]]:
    if isinstance(prompt, str):
        if not prompt.strip():
            raise InvalidRequestError("the prompt is empty")
        return [{"role": "user", "content": prompt}]
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes):
        raise InvalidRequestError(f"a prompt is a string or a list of messages, not {type(prompt).__name__}")
    if not prompt:
        raise InvalidRequestError("the conversation has no messages")
    for position, message in enumerate(prompt):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InvalidRequestError(f"message {position} is not an object with a 'role' and a 'content'")
    return [dict(message) for message in prompt]
