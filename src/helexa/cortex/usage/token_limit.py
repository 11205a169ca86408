"""Computes an upper bound of the number of tokens that a request can use.

For each API, one function reads the request fields that limit the tokens in this API.

The gateway reserves the bound, `TokenLimit.most_tokens`, from the key's budget before it forwards the request. A
request cannot use more tokens, because:

* Prompt: a token has at least one byte of text, and the JSON around a message is longer than the text that a chat
  template adds to the message. `PROMPT_OVERHEAD` covers the text that a template adds once per conversation. Images and
  other files can have more tokens than their URL has bytes; `media_tokens.media_tokens` bounds their tokens.
* Output: the gateway forwards the request with the output limit that it has reserved (`ClientRequest.body_for`), so the
  node enforces this limit.
"""

import re
from collections.abc import Callable
from typing import Any

import msgspec

from helexa.core.errors import invalid_body

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
EMBEDDINGS = "/v1/embeddings"
IMAGES = "/v1/images/generations"
RESPONSES = "/v1/responses"
COMPACT = "/v1/responses/compact"

MAX_OUTPUT = 1 << 31
MAX_COMPLETIONS = 128
PROMPT_OVERHEAD = 512
BYTES_PER_TOKEN = 4
"""Typical number of bytes per token of text, for estimates."""
DRAWN_IMAGE_TOKENS = 8192
"""Tokens of one generated image."""
UNKNOWN_CONTEXT = 131_072
"""Assumed prompt tokens of a stored conversation if the model's context length is unknown."""

OUTPUT_LIMITS = frozenset({"max_tokens", "max_completion_tokens", "max_output_tokens"})
MULTIPLIERS = frozenset({"n", "best_of"})
LIMIT_ALIASES = frozenset({"n_predict", "num_predict", "max_new_tokens", "max_length", "options"})
"""Names under which some third-party backends read an output limit."""

_LIST_OF_TEXTS = re.compile(rb'\[\s*["\[]')
_MAX_COUNTED = 100_000
_NULL = msgspec.Raw(b"null")
_elements = msgspec.json.Decoder(list[msgspec.Raw])


class Fields(msgspec.Struct):
    """The fields of a request body that the gateway reads. The node checks all other fields."""

    model: Any = None
    stream: Any = None
    stream_options: Any = None
    max_tokens: Any = None
    max_completion_tokens: Any = None
    max_output_tokens: Any = None
    n: Any = None
    best_of: Any = None
    previous_response_id: Any = None
    prompt: msgspec.Raw = _NULL
    input: msgspec.Raw = _NULL


class TokenLimit(msgspec.Struct, frozen=True):
    """The values in a request that limit how many tokens the request can use.

    Attributes:
        prompt: upper bound of the tokens of all prompts in the request body, without images and other files.
        prompts: number of prompts in the request body.
        completions: number of completions of all prompts together; 0 if the API generates nothing.
        output: maximum number of tokens of each completion; None if the request sets no limit.
        limit_field: the request field that limits the output in this API; None if the API has no such field.
        multipliers: the request fields with which this API produces several completions.
        continues: True if the prompt also includes a conversation that is stored on a node.
    """

    prompt: int
    prompts: int = 1
    completions: int = 1
    output: int | None = None
    limit_field: str | None = "max_tokens"
    multipliers: frozenset[str] = frozenset({"n"})
    continues: bool = False

    def fills(self, context: int | None) -> bool:
        """Return whether the upper bound of the prompts' tokens reaches the context length.

        A higher bound, for example because of images, then does not change the result of `most_tokens`.
        """
        limited = self.limit_field is not None or not self.completions
        return context is not None and limited and self.prompt >= self.prompts * context

    def most_tokens(self, output: int, context: int | None) -> int:
        """Return the maximum number of tokens of all prompts and completions together.

        Args:
            output: maximum number of tokens of each completion.
            context: the model's context length: maximum number of tokens of a prompt and one completion together. None
                if unknown.
        """
        prompt = self.prompt
        if self.continues:
            prompt = max(prompt, context or UNKNOWN_CONTEXT)
        if not self.completions:
            return prompt if context is None else min(prompt, self.prompts * context)
        if context is not None and self.limit_field is not None:
            output = min(output, context)
            prompt = min(prompt, self.prompts * (context - output))
        return prompt + self.completions * output


def read_token_limit(path: str, fields: Fields, body: bytes) -> TokenLimit:
    """Return the values that limit the tokens of a request to the API `path`.

    Raises:
        ApiError: 400 `invalid_request_body` if such a value in the request has the wrong type or is out of range.
    """
    return _READERS.get(path, _without_output)(fields, len(body) + PROMPT_OVERHEAD)


def _chat(fields: Fields, prompt: int) -> TokenLimit:
    return TokenLimit(prompt, completions=_completion_count(fields), output=_chat_limit(fields))


def _completions(fields: Fields, prompt: int) -> TokenLimit:
    prompts = _text_count(fields.prompt)
    limit = _chat_limit(fields, minimum=0)
    candidates = max(_completion_count(fields), _number("best_of", fields.best_of, MAX_COMPLETIONS) or 1)
    completions = prompts * candidates
    return TokenLimit(prompt, prompts, completions, limit, multipliers=MULTIPLIERS)


def _responses(fields: Fields, prompt: int) -> TokenLimit:
    return TokenLimit(
        prompt,
        output=_number("max_output_tokens", fields.max_output_tokens),
        limit_field="max_output_tokens",
        multipliers=frozenset(),
        continues=isinstance(fields.previous_response_id, str),
    )


def _embeddings(fields: Fields, prompt: int) -> TokenLimit:
    return TokenLimit(prompt, _text_count(fields.input), completions=0, limit_field=None)


def _images(fields: Fields, prompt: int) -> TokenLimit:
    return TokenLimit(prompt, completions=_completion_count(fields), output=DRAWN_IMAGE_TOKENS, limit_field=None)


def _without_output(fields: Fields, prompt: int) -> TokenLimit:
    return TokenLimit(prompt, completions=0, limit_field=None)


_READERS: dict[str, Callable[[Fields, int], TokenLimit]] = {
    CHAT: _chat,
    COMPLETIONS: _completions,
    RESPONSES: _responses,
    COMPACT: _responses,
    EMBEDDINGS: _embeddings,
    IMAGES: _images,
}


def _chat_limit(fields: Fields, minimum: int = 1) -> int | None:
    """Return the output limit of a request; None if it sets none. `max_completion_tokens` overrides `max_tokens`.

    Args:
        fields: the fields of the request body.
        minimum: the smallest allowed value of `max_tokens`.
    """
    legacy_limit = _number("max_tokens", fields.max_tokens, minimum=minimum)
    return _number("max_completion_tokens", fields.max_completion_tokens) or legacy_limit


def _completion_count(fields: Fields) -> int:
    return _number("n", fields.n, MAX_COMPLETIONS) or 1


def _number(name: str, value: Any, maximum: int | None = None, minimum: int = 1) -> int | None:
    if value is None:
        return None
    if type(value) is not int:
        raise invalid_body(f"{name}: must be a whole number", name)
    if value < minimum or (maximum is not None and value > maximum):
        raise invalid_body(f"{name}: must be at least {minimum}" + (f" and at most {maximum}" if maximum else ""), name)
    return min(value, MAX_OUTPUT)


def _text_count(value: msgspec.Raw) -> int:
    """Return the number of texts in the JSON value of a `prompt` or `input` field.

    A string or a list of token ids is one text. A list of strings or of token id lists contains several texts. For very
    long lists, the result is an upper bound.
    """
    text = memoryview(value)
    if _LIST_OF_TEXTS.match(text) is None:
        return 1
    max_texts = bytes(text).count(b",") + 1
    return len(_elements.decode(value)) if max_texts <= _MAX_COUNTED else max_texts
