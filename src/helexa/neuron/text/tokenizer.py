"""A model's tokenizer: converts text to token ids and token ids to text.

This module does not import the library `tokenizers`: a node's server process tokenizes in other processes.
"""

import codecs
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

import msgspec

from helexa.core.errors import UnsupportedModelError

if TYPE_CHECKING:
    import tokenizers

Speller = Callable[[str], bytes]  # function from the text of a token in the vocabulary to the bytes that it represents

Spelling = Literal["byte_level", "sentencepiece", "wordpiece"]  # how the texts of a vocabulary represent bytes

_SPACE = "▁"
_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")

# Common texts of tokens that end a turn, used in addition to the end tokens in the model's files.
_END_TOKENS = {
    *("<eos>", "<|endoftext|>", "<|end_of_text|>", "<｜end▁of▁sentence｜>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>"),
    *("<|eot|>", "<|eom|>", "<end_of_turn>", "<turn|>", "<end_of_utterance>", "<EOT>", "[EOT]"),
    *("<|return|>", "<|call|>", "<|end|>"),
    "<|tool_response>",  # Gemma 4 begins the results of its calls with this token
}
# Tokens of infilling prompts (fill in the middle). They never belong to the text that fills a gap. A model that
# generates one of them has filled the gap and continues with another file or example.
_INFILLING_TOKENS = {
    *("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|fim_repo|>", "<|repo_name|>"),  # Qwen
    *("<|file_sep|>", "<|file_separator|>"),  # Qwen, CodeGemma
    *("<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<fim_pad>", "<reponame>", "<repo_name>"),  # StarCoder, Granite
    *("<fim-prefix>", "<fim-middle>", "<fim-suffix>", "<fim-pad>", "<file_sep>", "<filename>", "<gh_stars>"),
    *("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
    *("▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>"),  # Code Llama
    *("[PREFIX]", "[SUFFIX]", "[MIDDLE]"),  # Codestral
    *("<|code_prefix|>", "<|code_middle|>", "<|code_suffix|>"),  # GLM
}
# In vocabularies with the first token, the second token ends a message but not the turn.
_ENDS_OF_MESSAGES = {"<|return|>": "<|end|>", "<|message|>": "<|eom|>"}


class AddedText(msgspec.Struct, frozen=True, array_like=True):
    """An added token: its text, and whether it is a control token."""

    content: str
    special: bool


class Vocabulary(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens of a model, as plain data that is sent between processes."""

    ids: dict[str, int]  # the id of each token, by text
    added: dict[int, AddedText]  # the added tokens, by id
    spelling: Spelling
    bos_id: int | None = None  # id of the beginning-of-sequence token, or None
    eos_id: int | None = None  # id of the end-of-sequence token that the model's files specify, or None
    # ids of the tokens that end generation, according to the model's files
    end_ids: list[int] = msgspec.field(default_factory=list[int])
    # ids of the tokens that the files request at the beginning and at the end of a prompt
    prefix: list[int] = msgspec.field(default_factory=list[int])
    suffix: list[int] = msgspec.field(default_factory=list[int])


def _byte_alphabet() -> dict[str, int]:
    """Return the byte that each character of byte-level vocabularies represents."""
    # As in GPT-2: the code of a printable byte is the code of its character. Other bytes are U+0100, U+0101, ...
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    unprintable = [byte for byte in range(0x100) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(0x100 + index): byte for index, byte in enumerate(unprintable)}


_BYTES = _byte_alphabet()


def spelling_of(backend: "tokenizers.Tokenizer") -> Spelling:
    """Return the spelling that a tokenizer's decoder expects.

    Raises:
        ModelFileError: the decoder is not byte-level, SentencePiece or WordPiece.
    """
    kinds = set(_decoder_kinds(json.loads(backend.decoder.__getstate__()))) if backend.decoder else set()
    if "ByteLevel" in kinds:
        return "byte_level"
    if kinds & {"Metaspace", "ByteFallback"}:
        return "sentencepiece"
    if "WordPiece" in kinds:
        return "wordpiece"
    raise UnsupportedModelError(
        f"a tokenizer with the decoder {', '.join(sorted(kinds)) or 'none'} is not supported; "
        "supported are ByteLevel, Metaspace, ByteFallback and WordPiece"
    )


def _token_spellers(spelling: Spelling) -> tuple[Speller, Speller]:
    """Return functions that convert the text of a token to bytes.

    The first is for the tokens of the tokenization model, the second for added tokens that are not special.
    """
    match spelling:
        case "byte_level":
            return _byte_level, str.encode
        case "sentencepiece":
            return _sentencepiece, _sentencepiece  # added tokens may contain spaces, such as Gemma's runs of spaces
        case "wordpiece":
            return _wordpiece, str.encode


def _decoder_kinds(decoder: dict[str, Any]) -> Iterator[str]:
    yield decoder["type"]
    for inner in decoder.get("decoders", ()):
        yield from _decoder_kinds(inner)


def _byte_level(token: str) -> bytes:
    try:
        return bytes([_BYTES[character] for character in token])
    except KeyError:
        return token.encode()


def _sentencepiece(token: str) -> bytes:
    byte = _BYTE.fullmatch(token)
    return token.replace(_SPACE, " ").encode() if byte is None else bytes.fromhex(byte[1])


def _wordpiece(token: str) -> bytes:
    return token[2:].encode() if token.startswith("##") else f" {token}".encode()


class TextOffsets:
    """Finds the positions of tokens in their decoded text."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._characters = 0

    def push(self, token: bytes) -> int:
        """Add the bytes of the next token and return the index of its character.

        This is the index of the character that the token begins or continues. A token without bytes has the index of
        the next character.
        """
        incomplete, _ = self._decoder.getstate()
        offset = self._characters
        if incomplete and token and not 0x80 <= token[0] < 0xC0:
            offset += 1  # the token does not continue the incomplete character, which becomes U+FFFD
        self._characters += len(self._decoder.decode(token))
        return offset

    def end_text(self) -> None:
        """End the text. An incomplete character becomes U+FFFD."""
        self._characters += len(self._decoder.decode(b"", final=True))


class Encoder(Protocol):
    """Converts text to token ids. Encoders are thread-safe."""

    def ids(self, text: str, *, parse_special: bool, continues: bool) -> list[int]:
        """Return the token ids of `text` (see `Tokenizer.encode`).

        Raises:
            ModelFileError: the `tokenizers` library fails because of invalid rules, or exceeds a limit of the encoder.
        """
        ...

    def spans(self, text: str) -> list[tuple[int, int]]:
        """Return (start, end) of each token of `text`, in characters.

        The tokens are those of `ids` with `parse_special` and without `continues`.

        Raises:
            ModelFileError: see `ids`.
        """
        ...


TOKEN_ITEM = "I"  # type of the items of `array.array` in responses with tokens: unsigned integers of 32 bits


class TextRequest(msgspec.Struct, frozen=True):
    """A request to tokenize in the tokenizer process; the text follows a line break."""

    path: bytes  # the model's file or folder, as bytes of the file system
    # `open` for the `TextSettings` of the model, `ids` for the token ids of the text, or `spans` for the positions of
    # its tokens
    kind: Literal["open", "ids", "spans"]
    seconds: float = 0.0  # maximum CPU time for the text, in seconds
    # see `Tokenizer.encode`
    parse_special: bool = True
    continues: bool = False


class Tokenizer:
    """A model's vocabulary and tokenization rules. Tokenizers are thread-safe."""

    def __init__(self, vocabulary: Vocabulary, encoder: Encoder) -> None:
        self._encoder = encoder
        self._ids = vocabulary.ids
        self._added = vocabulary.added
        self._texts = {token_id: text for text, token_id in vocabulary.ids.items()}
        self._spell, self._spell_added = _token_spellers(vocabulary.spelling)
        self.bos_id = vocabulary.bos_id  # id of the beginning-of-sequence token, or None
        self.eos_id = vocabulary.eos_id  # id of the end-of-sequence token that the model's files specify, or None
        # ids of the tokens that `encode(..., add_special=True)` puts first, and of those that it puts last
        self.prefix, self.suffix = vocabulary.prefix, vocabulary.suffix
        names = _END_TOKENS | _INFILLING_TOKENS
        names -= {end for token, end in _ENDS_OF_MESSAGES.items() if self.token_id(token) is not None}
        known_ends = (token_id for token_id, token in self._added.items() if token.content in names)
        stated_ends = [] if self.eos_id is None else [self.eos_id]
        # ids of all tokens that end generation
        self.eos_ids: frozenset[int] = frozenset([*vocabulary.end_ids, *known_ends, *stated_ends])

    @property
    def vocab_size(self) -> int:
        """Number of tokens. The logits of a model may have more entries, as padding."""
        return len(self._ids)

    def encode(
        self, text: str, *, add_special: bool = False, parse_special: bool = True, continues: bool = False
    ) -> list[int]:
        """Return the token ids of `text`.

        Args:
            text: any text. Lone surrogates are read as U+FFFD.
            add_special: whether to add `prefix` and `suffix`, the tokens that the model's files request. A text that
                begins with the tokens of `prefix`, or ends with those of `suffix`, does not get them again.
            parse_special: if False, the texts of control tokens are encoded as plain text.
            continues: if True, the text continues other tokens, and a SentencePiece model adds no space before it.

        Raises:
            ModelFileError: the tokenizer fails or exceeds a limit, because its rules are invalid or `text` is too long.
        """
        # By default, a string such as `<|im_end|>` in the text becomes the control token with this name, because
        # rendered chat templates need it. As a consequence, a user's message can contain control tokens.
        ids = self._encoder.ids(text, parse_special=parse_special, continues=continues)
        if not add_special:
            return ids
        prefix, suffix = self._missing(ids)
        return [*prefix, *ids, *suffix]

    def _missing(self, ids: list[int]) -> tuple[list[int], list[int]]:
        # Prompts that a program rendered with a chat template often begin with the beginning-of-sequence token, and
        # some programs append the last token of an embedding model themselves. Models have never seen such a token
        # twice in a row, and answer worse.
        has_prefix = ids[: len(self.prefix)] == self.prefix
        inner = ids[len(self.prefix) :] if has_prefix else ids  # a token that is the prefix is not also the suffix
        has_suffix = inner[max(len(inner) - len(self.suffix), 0) :] == self.suffix
        return [] if has_prefix else self.prefix, [] if has_suffix else self.suffix

    def offsets(self, text: str) -> list[int]:
        """Return the index in `text` of each token's first character.

        The tokens are those of `encode(text, add_special=True)`. A token that continues a character has the index of
        this character.
        """
        prefix, suffix = self._missing(self.encode(text)) if self.prefix or self.suffix else ([], [])
        offsets, end = [0] * len(prefix), 0
        for start, stop in self._encoder.spans(text):
            offsets.append(min(start, end))  # some tokenizers leave out the spaces at the beginning of a token
            end = max(end, stop)
        return [*offsets, *[len(text)] * len(suffix)]

    def decoded_offsets(self, ids: Iterable[int]) -> list[int]:
        """Return the index in `decode(ids)` of each token's character (see `TextOffsets`)."""
        offsets = TextOffsets()
        return [offsets.push(self.token_bytes(token_id)) for token_id in ids]

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Return the text of the tokens `ids`. Invalid UTF-8 becomes U+FFFD."""
        # Unlike the `tokenizers` library, keep SentencePiece's leading space, so that texts of parts can be joined.
        spelled = b"".join([self.token_bytes(token_id, skip_special=skip_special) for token_id in ids])
        return spelled.decode("utf-8", "replace")

    def token_bytes(self, token_id: int, *, skip_special: bool = True) -> bytes:
        """Return the bytes of a token; b"" for an unknown id or a skipped control token."""
        added = self._added.get(token_id)
        if added is not None:
            if not added.special:
                return self._spell_added(added.content)
            return b"" if skip_special else added.content.encode()
        token = self._texts.get(token_id)
        return b"" if token is None else self._spell(token)

    def token_id(self, text: str) -> int | None:
        """Return the id of the token whose text in the vocabulary is `text`, or None."""
        return self._ids.get(text)

    def token_text(self, token_id: int | None) -> str | None:
        """Return the text of a token as in the vocabulary, None for an unknown id."""
        if token_id is None:
            return None
        added = self._added.get(token_id)  # the `tokenizers` library would return the normalized text of the token
        return self._texts.get(token_id) if added is None else added.content

    def control_id(self, text: str) -> int | None:
        """Return the id of the control token whose text is `text`, or None."""
        token_id = self._ids.get(text)
        added = None if token_id is None else self._added.get(token_id)
        return token_id if added is not None and added.special else None

    def added_text(self, token_id: int) -> str:
        """Return the text of an added token, such as a control token; else ""."""
        added = self._added.get(token_id)
        return "" if added is None else added.content


class Detokenizer:
    """Converts the generated tokens of one sequence to text incrementally.

    The bytes of an incomplete UTF-8 character are held back until the character is complete. Invalid bytes become
    U+FFFD. Control tokens have no text, except those in `shown`, which maps their ids to bytes.
    """

    def __init__(self, tokenizer: Tokenizer, shown: Mapping[int, bytes] | None = None) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._shown = shown or {}
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Sequence[int]) -> str:
        """Add the generated tokens `ids` and return the text that they complete."""
        spell, shown = self._token_bytes, self._shown
        return self._decoder.decode(b"".join([shown.get(token_id) or spell(token_id) for token_id in ids]))

    def flush(self) -> str:
        """Return the text that was held back. An incomplete character becomes U+FFFD."""
        return self._decoder.decode(b"", final=True)
