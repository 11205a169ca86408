"""Upper bounds of the tokens that a request can use: prompt, files and output.

For each API, one function reads the request fields that limit the tokens in this API. The gateway reserves the bound,
`TokenLimit.most_tokens`, from the key's budget before it forwards the request. A request cannot use more tokens than
this bound, for these reasons:

* Prompt: a token has at least one byte of text, and the JSON around a message is longer than the text that a chat
  template adds to the message. `PROMPT_OVERHEAD` covers the text that a template adds once per conversation. Images and
  other files can have more tokens than their URL has bytes; `media_tokens` bounds their tokens.
* Output: the gateway forwards the request with the output limit that it has reserved (`ClientRequest.body_for`), so the
  node enforces this limit.
"""

import re
from collections.abc import Callable
from typing import Any

import msgspec
import orjson

from helexa.core.errors import ApiError, invalid_body
from helexa.core.wire.request import NO_LIMIT
from helexa.core.wire.responses_input import referenced_response
from helexa.cortex.upstream.usage_meter import BYTES_PER_TOKEN

# Bytes of the longest token in common vocabularies. Llama 3, Qwen 2.5 and Qwen 3 have a token of 128 spaces.
MAX_BYTES_PER_TOKEN = 128
_MESSAGE_BYTES = 8

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
EMBEDDINGS = "/v1/embeddings"
IMAGES = "/v1/images/generations"
RESPONSES = "/v1/responses"
COMPACT = "/v1/responses/compact"

MAX_OUTPUT = 1 << 31
# OpenAI's maximum of `n`.
MAX_COMPLETIONS = 128
PROMPT_OVERHEAD = 512
DRAWN_IMAGE_TOKENS = 8192  # tokens of one generated image
UNKNOWN_CONTEXT = 131_072  # assumed prompt tokens of a stored conversation if the model's context length is unknown

OUTPUT_LIMITS = frozenset({"max_tokens", "max_completion_tokens", "max_output_tokens"})
MULTIPLIERS = frozenset({"n", "best_of"})
# Names under which some third-party backends read an output limit.
LIMIT_ALIASES = frozenset({"n_predict", "num_predict", "max_new_tokens", "max_length", "options"})

_LIST_OF_TEXTS = re.compile(rb'\[\s*["\[]')
_MAX_COUNTED = 100_000
_NULL = msgspec.Raw(b"null")
_elements = msgspec.json.Decoder(list[msgspec.Raw])


class Fields(msgspec.Struct):
    """The fields of a request body that the gateway reads, mainly to bound its tokens."""

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
    """The values in a request that limit how many tokens the request can use."""

    prompt: int  # upper bound of the tokens of all prompts in the request body, without images and other files
    prompts: int = 1  # number of prompts in the request body
    completions: int = 1  # number of completions of all prompts together; 0 if the API generates nothing
    output: int | None = None  # maximum number of tokens of each completion; None if the request sets no limit
    # the request field that limits the output in this API; None if the API has no such field
    limit_field: str | None = "max_tokens"
    # the request fields with which this API produces several completions
    multipliers: frozenset[str] = frozenset({"n"})
    continues: bool = False  # True if the prompt also includes a conversation that is stored on a node
    # id of the stored response that the request continues or refers to; None if it refers to no stored response
    stored: str | None = None

    def fills(self, context: int | None) -> bool:
        """Return whether the upper bound of prompt tokens reaches the context length.

        If it does, a higher bound, for example because of images, would not change the result of `most_tokens`.
        """
        limited = self.limit_field is not None or not self.completions
        return context is not None and limited and self.prompt >= self.prompts * context

    def most_tokens(self, output: int, context: int | None) -> int:
        """Return the maximum number of tokens of all prompts and completions together.

        `output` is the output limit of each completion. `context` is the model's context length, or None if unknown.
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
        ApiError: 400 `invalid_request_body` if one of these values has the wrong type or is out of range.
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
    stored = referenced_response(fields.previous_response_id, fields.input)
    return TokenLimit(
        prompt,
        output=_number("max_output_tokens", fields.max_output_tokens),
        limit_field="max_output_tokens",
        multipliers=frozenset(),
        continues=stored is not None,
        stored=stored,
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
    """Return the output limit of a request, or None if it sets none."""
    legacy_limit = _limit("max_tokens", fields.max_tokens, minimum)
    return _limit("max_completion_tokens", fields.max_completion_tokens) or legacy_limit


def _limit(name: str, value: Any, minimum: int = 1) -> int | None:
    if type(value) is int and value < minimum:
        if value == NO_LIMIT:
            return None
        raise invalid_body(
            f"{name}: must be at least {minimum}, or {NO_LIMIT} for no limit, not {str(value)[:40]}", name
        )
    return _number(name, value, minimum=minimum)


def _completion_count(fields: Fields) -> int:
    return _number("n", fields.n, MAX_COMPLETIONS) or 1


def _number(name: str, value: Any, maximum: int | None = None, minimum: int = 1) -> int | None:
    if value is None:
        return None
    if type(value) is not int:
        raise invalid_body(f"{name}: must be a whole number, not a {type(value).__name__}", name)
    if value < minimum or (maximum is not None and value > maximum):
        raise invalid_body(
            f"{name}: must be at least {minimum}"
            + (f" and at most {maximum}" if maximum else "")
            + f", not {str(value)[:40]}",
            name,
        )
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


IMAGE_TOKENS = 4096  # maximum number of tokens of one image or other file in a prompt

_LONG_BODY_BYTES = 16 << 10
_SEARCHED_QUOTES = 64
_MEDIA = ("image_url", "input_image", "image", "video_url", "audio_url", "input_file", "file")
_MEDIA_MEMBERS = ("image_url", "video_url", "audio_url", "file_url")


class PromptImages(msgspec.Struct, frozen=True):
    """The images of one prompt."""

    count: int = 0
    url_bytes: int = 0  # number of bytes of all data URLs in the request body. These bytes are not text of the prompt.
    tokens: int = 0  # estimated number of tokens of all images


NO_IMAGES = PromptImages()


def media_tokens(body: bytes) -> int:
    """Return the maximum number of tokens of images and other files in a request body."""
    return IMAGE_TOKENS * _media_parts(body)


def has_media(body: bytes) -> bool:
    """Return whether a body may contain an image or a file. False is certain."""
    return _media_parts(body) > 0


def _media_parts(body: bytes) -> int:
    """Return an upper bound of the number of images and other files in a request body.

    Some servers recognize a file by the value of the key `type` in a content part. Other servers recognize a file by a
    key such as `image_url` in the content part. The function counts both, and returns the larger count.
    """
    matches = _find_all(_MEDIA_OR_ESCAPE, body)
    media_members = [name for name in matches if name]
    if any(b"\\" in name for name in media_members):
        matches = _ESCAPED_MEDIA.findall(body)
        media_members = [name for name in matches if name]
    return max(len(matches) - len(media_members), len(media_members))


def _find_all(pattern: re.Pattern[bytes], body: bytes) -> list[bytes]:
    """Return the result of `pattern.findall(body)`, but faster for long bodies."""
    matches: list[bytes] = []
    end = 0
    # Each match begins with a quotation mark, which `bytes.find` finds faster than the pattern does.
    for _ in range(_SEARCHED_QUOTES if len(body) > _LONG_BODY_BYTES else 0):
        start = body.find(b'"', end)
        if start < 0:
            return matches
        match = pattern.match(body, start)
        if match is not None:
            matches.append(match[1] or b"")
        end = start + 1 if match is None else match.end()
    return matches + pattern.findall(body, end)


def _escapable(name: str) -> str:
    """Return a regular expression for `name` in JSON, also with escaped letters."""
    return "".join(rf"(?:{letter}|\\u00(?i:{ord(letter):x}))" for letter in name)


def _media_pattern(name_pattern: Callable[[str], str], alternative: str = "") -> re.Pattern[bytes]:
    """Return a pattern that finds images and other files in a request body.

    A match is either the type of a content part, such as `"type": "image_url"`, or a JSON key, such as `"image_url":`.
    For a type, group 1 of the match is empty. For a key, group 1 contains the key and the colon.

    Args:
        name_pattern: function that returns the regular expression for a type or key.
        alternative: `|` and a regular expression that group 1 may match instead of a key, or an empty string.
    """
    types, members = ("|".join(map(name_pattern, names)) for names in (_MEDIA, _MEDIA_MEMBERS))
    initials = r"(?=[tivaf\\])"  # first letters of all names, with which the pattern quickly rejects most strings
    return re.compile(
        rf'"{initials}(?:{name_pattern("type")}"\s*:\s*"(?:{types})"|((?:{members})"\s*:{alternative}))'.encode()
    )


_ESCAPED_MEDIA = _media_pattern(_escapable)
# This pattern also matches strings with an escaped letter. If the body has any, the slower `_ESCAPED_MEDIA` is used.
_MEDIA_OR_ESCAPE = _media_pattern(str, r"|[a-z_]{0,11}+\\u00[4-7]")


def check_prompt(body: bytes, context: int) -> None:
    """Reject a prompt that is longer than `context` tokens, whatever the tokenizer.

    Raises:
        ApiError: 400 `context_length_exceeded`. The error contains the size in bytes and an estimated token count.
    """
    # The gateway does not know the exact token count: one token can be four bytes of English, one digit, or 128 spaces.
    # It therefore assumes `MAX_BYTES_PER_TOKEN` bytes per token, and accepts prompts that might fit. The node counts
    # the tokens and may still reject the prompt.
    max_bytes = MAX_BYTES_PER_TOKEN * context
    if len(body) > max_bytes and (size := prompt_bytes(body)) > max_bytes:
        estimate = size // BYTES_PER_TOKEN
        raise ApiError(
            400,
            "context_length_exceeded",
            f"This model's maximum context length is {context} tokens. However, your messages have {size} bytes of "
            f"text, an estimated {estimate} tokens. Please reduce the length of the messages.",
            param="messages",
            max=context,
            estimated_prompt_tokens=estimate,
        )


def prompt_bytes(body: bytes) -> int:
    """Return the bytes of text in a prompt, plus eight bytes per message or item.

    If the request has several prompts or embedding texts, the length of the longest one is returned. Token ids and
    images count as 0 bytes. The result is 0 if the body is not valid JSON.
    """
    try:
        content = orjson.loads(body)
    except orjson.JSONDecodeError:
        return 0
    messages, prompt, input_items = content.get("messages"), content.get("prompt"), content.get("input")
    if isinstance(input_items, str):
        input_items = [{"content": input_items}]
    if isinstance(messages, list):
        return _message_bytes(messages)
    if isinstance(prompt, str | list):
        return _longest_text_bytes(prompt)
    if isinstance(input_items, list) and any(isinstance(item, dict) for item in input_items):
        instructions = [{"content": content["instructions"]}] if content.get("instructions") else []
        return _message_bytes(instructions + input_items)
    return _longest_text_bytes(input_items) if isinstance(input_items, list) else 0


def _message_bytes(messages: list[Any]) -> int:
    return sum(_MESSAGE_BYTES + _text_bytes(message) for message in messages)


def _longest_text_bytes(prompt: str | list[Any]) -> int:
    texts = [prompt] if isinstance(prompt, str) else [item for item in prompt if isinstance(item, str)]
    return max((len(text.encode()) for text in texts), default=0)


def _text_bytes(message: Any) -> int:
    """Return the bytes of text in a message, or in an input item of Responses."""
    content = message.get("content") or message.get("output") if isinstance(message, dict) else None
    if isinstance(content, str):
        return len(content.encode())
    parts = content if isinstance(content, list) else []
    texts = (part.get("text") for part in parts if isinstance(part, dict))
    return sum(len(text.encode()) for text in texts if isinstance(text, str))
