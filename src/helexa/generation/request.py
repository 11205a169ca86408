"""One prompt with its options, in the form that targets accept."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from helexa.generation.errors import InvalidRequestError
from helexa.generation.sampling import Sampling
from helexa.generation.schema import AnswerSchema

Message = Mapping[str, Any]
"""A message of a conversation, `{"role": "user", "content": "..."}`, as in OpenAI's chat API."""

Prompt = str | Sequence[Message]
"""The text of a user message, or a conversation."""

_SEEDS = 1 << 31  # seeds that every server accepts


@dataclass(frozen=True, slots=True)
class Ask:
    """The options that all prompts of a call share.

    Attributes:
        sampling: sampling options.
        system: system prompt before each prompt, or None.
        schema: schema of each answer, or None.
        think: whether the model reasons before it answers; None selects the model's default.
    """

    sampling: Sampling = field(default_factory=Sampling)
    system: str | None = None
    schema: AnswerSchema | None = None
    think: bool | None = None

    def request(self, prompt: Prompt, number: int = 0) -> "Request":
        """Return the request for `prompt` with these options.

        The seed of the request is the seed of `sampling` plus `number`. If `sampling` has no seed, it is random.

            Raises:
                InvalidRequestError: the prompt is invalid.
        """
        messages = _messages(prompt)
        if self.system is not None:
            messages.insert(0, {"role": "system", "content": self.system})
        base_seed = self.sampling.seed
        seed = secrets.randbelow(_SEEDS) if base_seed is None else base_seed + number
        return Request(messages, replace(self.sampling, seed=seed), seed, self.schema, self.think)


@dataclass(frozen=True, slots=True)
class Request:
    """A request for one answer: a conversation to continue, and the options of the answer.

    Attributes:
        messages: messages of the conversation.
        sampling: sampling options.
        seed: random seed of the answer, also contained in `sampling`.
        schema: schema of the answer, or None.
        think: whether the model reasons before it answers; None selects the model's default.
        streamed: whether the target returns pieces of the answer during generation.
    """

    messages: list[dict[str, Any]]
    sampling: Sampling
    seed: int
    schema: AnswerSchema | None = None
    think: bool | None = None
    streamed: bool = False

    def body(self, model: str) -> dict[str, Any]:
        """Return the request to `model` as the JSON body of an OpenAI chat completion."""
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
