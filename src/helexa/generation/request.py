"""One prompt and how to answer it, as every target takes it."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from helexa.generation.errors import InvalidRequestError
from helexa.generation.sampling import Sampling
from helexa.generation.schema import AnswerSchema

Message = Mapping[str, Any]
"""A turn of a conversation, `{"role": "user", "content": "..."}`, as OpenAI's chat API has it."""

Prompt = str | Sequence[Message]
"""What to ask: the text of a question, or a conversation so far."""

_SEEDS = 1 << 31  # every server takes these


@dataclass(frozen=True, slots=True)
class Ask:
    """How prompts are answered, apart from the prompts.

    Attributes:
        system: the system prompt before each of them.
        schema: what each answer must be.
        think: whether the model thinks before it answers; None leaves it to the model.
    """

    sampling: Sampling = field(default_factory=Sampling)
    system: str | None = None
    schema: AnswerSchema | None = None
    think: bool | None = None

    def request(self, prompt: Prompt, number: int = 0) -> "Request":
        """The request for `prompt`, which is the one of this number of those that are asked together.

        Raises:
            InvalidRequestError: it is no prompt.
        """
        messages = _messages(prompt)
        if self.system is not None:
            messages.insert(0, {"role": "system", "content": self.system})
        base_seed = self.sampling.seed
        seed = secrets.randbelow(_SEEDS) if base_seed is None else base_seed + number
        return Request(messages, replace(self.sampling, seed=seed), seed, self.schema, self.think)


@dataclass(frozen=True, slots=True)
class Request:
    """A conversation that wants its next turn. `seed` is that of `sampling`.

    Attributes:
        streamed: its pieces are wanted as they come.
    """

    messages: list[dict[str, Any]]
    sampling: Sampling
    seed: int
    schema: AnswerSchema | None = None
    think: bool | None = None
    streamed: bool = False

    def body(self, model: str) -> dict[str, Any]:
        """What it is in OpenAI's chat dialect."""
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
            raise InvalidRequestError(f"message {position} is no object with a 'role' and a 'content'")
    return [dict(message) for message in prompt]
