"""Upper bound of the tokens that a request can use.

One function per API reads the fields that the API honors.

A budget reserves `TokenLimit.most_tokens` before the request is forwarded. The bound is safe for two reasons:

* Prompt: a token has at least one byte of text, and the JSON around a message is longer than the text that a chat
  template puts around it. `PROMPT_OVERHEAD` covers the text that a template adds to the whole conversation. Images and
  other files can have more tokens than their URL has bytes; `media_tokens.media_tokens` bounds their tokens.
* Output: the reserved limit is also the forwarded limit (`ClientRequest.body_for`), so the node enforces it.
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

MOST_OUTPUT = 1 << 31
MOST_ANSWERS = 128
PROMPT_OVERHEAD = 512
BYTES_PER_TOKEN = 4
"""Bytes of text of a typical token, for estimates."""
DRAWN_IMAGE_TOKENS = 8192
"""Tokens of one generated image."""
UNKNOWN_CONTEXT = 131_072
"""Prompt tokens of a stored conversation, for a model whose context is unknown."""

OUTPUT_LIMITS = frozenset({"max_tokens", "max_completion_tokens", "max_output_tokens"})
MULTIPLIERS = frozenset({"n", "best_of"})
LIMIT_ALIASES = frozenset({"n_predict", "num_predict", "max_new_tokens", "max_length", "options"})
"""Names under which some third-party backends read an output limit."""

_SEVERAL = re.compile(rb'\[\s*["\[]')
_MOST_COUNTED = 100_000
_NOTHING = msgspec.Raw(b"null")
_elements = msgspec.json.Decoder(list[msgspec.Raw])


class Fields(msgspec.Struct):
    """The fields of a request body that the gateway reads; the node checks the others."""

    model: Any = None
    stream: Any = None
    stream_options: Any = None
    max_tokens: Any = None
    max_completion_tokens: Any = None
    max_output_tokens: Any = None
    n: Any = None
    best_of: Any = None
    previous_response_id: Any = None
    prompt: msgspec.Raw = _NOTHING
    input: msgspec.Raw = _NOTHING


class TokenLimit(msgspec.Struct, frozen=True):
    """The token-related settings of a request body.

    Attributes:
        prompt: upper bound of the tokens of all prompts that the body contains, without images and other files.
        prompts: number of prompts.
        answers: number of answers to all prompts; 0 if nothing is generated.
        output: maximum tokens of each answer, None if the body does not state it.
        limit_field: the field that limits the output in this API, or None.
        multipliers: the fields of this API that request several answers.
        continues: True if the prompt also contains a stored conversation.
    """

    prompt: int
    prompts: int = 1
    answers: int = 1
    output: int | None = None
    limit_field: str | None = "max_tokens"
    multipliers: frozenset[str] = frozenset({"n"})
    continues: bool = False

    def fills(self, context: int | None) -> bool:
        """Return whether the context bounds `most_tokens`, regardless of further tokens in the prompt."""
        limited = self.limit_field is not None or not self.answers
        return context is not None and limited and self.prompt >= self.prompts * context

    def most_tokens(self, output: int, context: int | None) -> int:
        """Return the maximum number of tokens of prompt and answers.

        Args:
            output: maximum tokens of each answer.
            context: maximum tokens of a prompt and one answer together, None if unknown.
        """
        prompt = self.prompt
        if self.continues:
            prompt = max(prompt, context or UNKNOWN_CONTEXT)
        if not self.answers:
            return prompt if context is None else min(prompt, self.prompts * context)
        if context is not None and self.limit_field is not None:
            output = min(output, context)
            prompt = min(prompt, self.prompts * (context - output))
        return prompt + self.answers * output


def read_spending(path: str, fields: Fields, body: bytes) -> TokenLimit:
    """Return the token-related settings of a request to `path`.

    Raises:
        ApiError: 400 `invalid_request_body`: a number that the API honors has the wrong type or is out of range.
    """
    return _READERS.get(path, _other)(fields, len(body) + PROMPT_OVERHEAD)


def _chat(fields: Fields, prompt: int) -> TokenLimit:
    return TokenLimit(prompt, answers=_answers(fields), output=_chat_limit(fields))


def _completions(fields: Fields, prompt: int) -> TokenLimit:
    prompts = _texts(fields.prompt)
    limit = _chat_limit(fields, least=0)
    candidates = max(_answers(fields), _number("best_of", fields.best_of, MOST_ANSWERS) or 1)
    answers = prompts * candidates
    return TokenLimit(prompt, prompts, answers, limit, multipliers=MULTIPLIERS)


def _responses(fields: Fields, prompt: int) -> TokenLimit:
    return TokenLimit(
        prompt,
        output=_number("max_output_tokens", fields.max_output_tokens),
        limit_field="max_output_tokens",
        multipliers=frozenset(),
        continues=isinstance(fields.previous_response_id, str),
    )


def _embeddings(fields: Fields, prompt: int) -> TokenLimit:
    return TokenLimit(prompt, _texts(fields.input), answers=0, limit_field=None)


def _images(fields: Fields, prompt: int) -> TokenLimit:
    return TokenLimit(prompt, answers=_answers(fields), output=DRAWN_IMAGE_TOKENS, limit_field=None)


def _other(fields: Fields, prompt: int) -> TokenLimit:
    return TokenLimit(prompt, answers=0, limit_field=None)


_READERS: dict[str, Callable[[Fields, int], TokenLimit]] = {
    CHAT: _chat,
    COMPLETIONS: _completions,
    RESPONSES: _responses,
    COMPACT: _responses,
    EMBEDDINGS: _embeddings,
    IMAGES: _images,
}


def _chat_limit(fields: Fields, least: int = 1) -> int | None:
    """Return the output limit as nodes read it: `max_completion_tokens` overrides `max_tokens`.

    Args:
        fields: the fields of the body.
        least: minimum value of `max_tokens`.
    """
    legacy_limit = _number("max_tokens", fields.max_tokens, least=least)
    return _number("max_completion_tokens", fields.max_completion_tokens) or legacy_limit


def _answers(fields: Fields) -> int:
    return _number("n", fields.n, MOST_ANSWERS) or 1


def _number(name: str, value: Any, most: int | None = None, least: int = 1) -> int | None:
    if value is None:
        return None
    if type(value) is not int:
        raise invalid_body(f"{name}: must be a whole number", name)
    if value < least or (most is not None and value > most):
        raise invalid_body(f"{name}: must be at least {least}" + (f" and at most {most}" if most else ""), name)
    return min(value, MOST_OUTPUT)


def _texts(value: msgspec.Raw) -> int:
    """Return the number of prompts or texts in `prompt` or `input`: a string, token ids, or a list of either."""
    text = memoryview(value)
    if _SEVERAL.match(text) is None:
        return 1
    most_texts = bytes(text).count(b",") + 1
    return len(_elements.decode(value)) if most_texts <= _MOST_COUNTED else most_texts
