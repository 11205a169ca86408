"""Requests: a prompt with its options, checked, for servers and private engines.

The options are sampling, images, and a schema that constrains the response.
"""

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from helexa.core.image_file import data_url
from helexa.core.sampling import Sampling
from helexa.generation.completion import Completion
from helexa.generation.errors import InvalidRequestError, SchemaError

if TYPE_CHECKING:
    from pydantic import BaseModel


Image = str | Path | bytes
"""An image: the path of a file, the contents of a file, or a URL (`data:`, `http:` or `https:`)."""

_URLS = ("data:", "http://", "https://")
_MAX_BYTES = 64 << 20

Message = Mapping[str, Any]
"""A message of a conversation, `{"role": "user", "content": "..."}`, as in OpenAI's chat API."""

Prompt = str | Sequence[Message]
"""The text of a user message, or the messages of a conversation."""

_SEEDS = 1 << 31  # random seeds are below this number, because all servers accept such seeds


def image_part(image: Image, folder: Path | None = None) -> dict[str, Any]:
    """Return the content part of a chat message for an image.

    A file becomes a data URL.

    Args:
        folder: folder that a relative path starts from. None means the working directory.

    Raises:
        InvalidRequestError: the file cannot be read, is too large, or is not a PNG, JPEG, WebP or GIF file.
    """
    if isinstance(image, str) and image.lower().startswith(_URLS):
        return _part(image)
    if isinstance(image, bytes):
        name, data = "the image", image
    elif isinstance(image, str | Path):
        name, data = str(image), _contents((folder or Path()) / image)
    else:
        raise InvalidRequestError(f"an image must be a path, a URL or bytes, not {type(image).__name__}")
    if len(data) > _MAX_BYTES:
        raise InvalidRequestError(f"{name} is larger than {_MAX_BYTES >> 20} MiB; send a smaller image")
    url = data_url(data)
    if url is None:
        raise InvalidRequestError(f"{name} is not a PNG, JPEG, WebP or GIF file; convert the image to one of these")
    return _part(url)


def with_images(messages: list[dict[str, Any]], images: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with image parts at the beginning of the last message.

    Raises:
        InvalidRequestError: the last message is not a message of the user.
    """
    if not images:
        return messages
    *earlier, last = messages
    if last["role"] != "user":
        raise InvalidRequestError(
            f"images need a conversation that ends with a message of the user, not of {last['role'][:80]!r}"
        )
    content = last.get("content")
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    return [*earlier, {**last, "content": [*images, *parts]}]


def _part(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def _contents(path: Path) -> bytes:
    try:
        with path.expanduser().open("rb") as file:
            return file.read(_MAX_BYTES + 1)
    except (OSError, ValueError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) else None
        raise InvalidRequestError(
            f"{path}: {reason or 'is not a path'}; name an image file that you can read"
        ) from None


@dataclass(frozen=True, slots=True)
class AnswerSchema:
    """In a request: a JSON Schema that constrains the response.

    Attributes:
        schema: the JSON Schema.
        model: pydantic class into which responses are parsed, or None for plain JSON values.
    """

    schema: dict[str, Any]
    model: "type[BaseModel] | None" = None

    @classmethod
    def from_schema(cls, schema: "Mapping[str, Any] | type[BaseModel] | None") -> "AnswerSchema | None":
        """Return an `AnswerSchema` for a JSON Schema or a pydantic model; None for None.

        Raises:
            InvalidRequestError: `schema` is neither a mapping nor a pydantic model.
        """
        if schema is None:
            return None
        if isinstance(schema, Mapping):
            return cls(dict(schema))
        if isinstance(schema, type) and hasattr(schema, "model_json_schema"):
            return cls(_closed(schema.model_json_schema()), schema)
        raise InvalidRequestError(f"a schema must be a JSON Schema or a pydantic model, not {schema!r:.100}")

    @property
    def response_format(self) -> dict[str, Any]:
        """The `response_format` field for the body of an OpenAI chat request."""
        return {"type": "json_schema", "json_schema": {"name": "answer", "schema": self.schema, "strict": True}}

    def parsed(self, completion: Completion) -> Any:
        """Parse a response.

        Return an instance of the pydantic class. If there is no class, return the JSON values without checking them
        against the schema.

        Raises:
            SchemaError: the response does not match the pydantic class, or is not JSON.
        """
        text = completion.text
        try:
            return json.loads(text) if self.model is None else self.model.model_validate_json(text)
        except ValueError as error:  # includes pydantic's ValidationError
            if completion.finish_reason == "length":
                reason = "the answer was truncated at the token limit; raise max_tokens"
            else:
                reason = " ".join(str(error).split())[:300]
            raise SchemaError(f"the answer does not match the schema: {reason}", completion) from None


# Keywords of JSON Schema whose values are schemas by name, and those whose values are no schemas.
_SCHEMAS_BY_NAME = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_VALUES = frozenset({"const", "enum", "default", "examples"})


def _closed(schema: Any) -> Any:
    """Return a copy of a JSON Schema in which objects have no additional properties.

    Only objects with `properties` change. If such a schema sets `additionalProperties` itself, this value is kept.
    """
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    closed: dict[str, Any] = {}
    for keyword, value in schema.items():
        if keyword in _SCHEMAS_BY_NAME and isinstance(value, dict):  # a property may have the name of a keyword
            closed[keyword] = {name: _closed(item) for name, item in value.items()}
        else:
            closed[keyword] = value if keyword in _VALUES else _closed(value)
    return {"additionalProperties": False, **closed} if isinstance(schema.get("properties"), dict) else closed


@dataclass(frozen=True, slots=True)
class Ask:
    """The options of a library call, which are the same for all prompts of the call.

    Attributes:
        sampling: sampling options.
        system: system prompt, which is put before each prompt, or None.
        schema: JSON Schema that constrains each response, or None.
        think: whether the model reasons before its response. None selects the model's default.
        images: content parts of the images that are put before each prompt.
        tools: tools that the model may call, in the format of OpenAI's chat API.
        tool_choice: OpenAI's field `tool_choice`, or None.
        logprobs: number of most likely tokens to report for each token, or None to report no log-probabilities.
    """

    sampling: Sampling = field(default_factory=Sampling)
    system: str | None = None
    schema: AnswerSchema | None = None
    think: bool | None = None
    images: tuple[dict[str, Any], ...] = ()
    tools: tuple[dict[str, Any], ...] = ()
    tool_choice: str | Mapping[str, Any] | None = None
    logprobs: int | None = None

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
        base_seed = self.sampling.fixed_seed
        seed = secrets.randbelow(_SEEDS) if base_seed is None else base_seed + number
        if seed == -1:
            seed = _SEEDS  # servers would replace -1 by a random seed
        return Request(
            messages,
            replace(self.sampling, seed=seed),
            seed,
            self.schema,
            self.think,
            tools=self.tools,
            tool_choice=self.tool_choice,
            logprobs=self.logprobs,
        )


@dataclass(frozen=True, slots=True)
class Request:
    """A request for one response: messages, and options of generation.

    Attributes:
        messages: messages of the conversation.
        sampling: sampling options.
        seed: random seed, which is also contained in `sampling`.
        schema: JSON Schema that constrains the response, or None.
        think: whether the model reasons before its response. None selects the model's default.
        streamed: whether the response is streamed during generation.
        tools, tool_choice, logprobs: see `Ask`.
    """

    messages: list[dict[str, Any]]
    sampling: Sampling
    seed: int
    schema: AnswerSchema | None = None
    think: bool | None = None
    streamed: bool = False
    tools: tuple[dict[str, Any], ...] = ()
    tool_choice: str | Mapping[str, Any] | None = None
    logprobs: int | None = None

    def body(self, model: str) -> dict[str, Any]:
        """Return the JSON body of an OpenAI chat completion request to `model`."""
        body = {"model": model, "messages": self.messages, "stream": self.streamed}
        body |= {name: value for name, value in asdict(self.sampling).items() if value is not None}
        if self.schema is not None:
            body["response_format"] = self.schema.response_format
        if self.think is not None:
            body["enable_thinking"] = self.think
        if self.tools:
            body["tools"] = list(self.tools)
        if self.tool_choice is not None:
            body["tool_choice"] = self.tool_choice
        if self.logprobs is not None:
            body |= {"logprobs": True, "top_logprobs": self.logprobs}
        return body


def alternatives(logprobs: Any) -> int | None:
    """Return how many likely tokens the option `logprobs` requests for each token.

    0 means that only the log-probability of the generated token is reported. None means that none is reported.

    Raises:
        InvalidRequestError: the option is neither a boolean nor a number of tokens.
    """
    if logprobs is None or isinstance(logprobs, bool):
        return 0 if logprobs else None
    if not isinstance(logprobs, int) or logprobs < 0:
        raise InvalidRequestError(f"logprobs must be True or a number of tokens, not {logprobs!r:.100}")
    return logprobs


def _messages(prompt: Any) -> list[dict[str, Any]]:
    if isinstance(prompt, str):
        if not prompt.strip():
            raise InvalidRequestError("the prompt is empty; pass some text")
        return [{"role": "user", "content": prompt}]
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes):
        raise InvalidRequestError(f"a prompt must be a string or a list of messages, not {type(prompt).__name__}")
    if not prompt:
        raise InvalidRequestError("the conversation has no messages; pass one or more")
    for position, message in enumerate(prompt):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InvalidRequestError(f"message {position} is not an object with a 'role' and a 'content'")
    return [dict(message) for message in prompt]
