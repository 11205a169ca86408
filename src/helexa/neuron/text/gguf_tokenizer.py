"""The byte-level BPE tokenizer that a GGUF file describes in its metadata."""

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from helexa.core.errors import ModelFileError

_T = TypeVar("_T")

_CONTROL = 3
_USER_DEFINED = 4


class PreTokenizer(NamedTuple):
    """How text is cut before the merges apply.

    Attributes:
        split: the cutter; its output is in the byte-level alphabet.
        normalizer: what happens to the text first.
        ignore_merges: a piece that is itself in the vocabulary is taken whole.
        add_bos: whether a prompt begins with the beginning-of-sequence token when the file does not say.
    """

    split: pre_tokenizers.PreTokenizer
    normalizer: normalizers.Normalizer | None = None
    ignore_merges: bool = False
    add_bos: bool = False


def _byte_level(*first: pre_tokenizers.PreTokenizer) -> pre_tokenizers.PreTokenizer:
    """GPT-2's own words, after `first`."""
    return pre_tokenizers.Sequence([*first, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)])


def _words(letter: str, digits: str) -> pre_tokenizers.PreTokenizer:
    """The words of the cl100k family, which differ in what a letter is and in how many digits make a number."""
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
        rf"|[^\r\n\p{{L}}\p{{N}}]?[{letter}]+"
        rf"|\p{{N}}{digits}"
        rf"| ?[^\s{letter}\p{{N}}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


_GPT_2 = PreTokenizer(_byte_level())
_SMOLLM = PreTokenizer(_byte_level(pre_tokenizers.Digits(individual_digits=True)))
_LLAMA_3 = PreTokenizer(_words(r"\p{L}", "{1,3}"), ignore_merges=True, add_bos=True)
_QWEN_2 = PreTokenizer(_words(r"\p{L}", ""), normalizers.NFC())
_QWEN_3_5 = PreTokenizer(_words(r"\p{L}\p{M}", ""), normalizers.NFC())

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "gpt-2": _GPT_2,
    "smollm": _SMOLLM,
    "llama-bpe": _LLAMA_3,
    "llama-v3": _LLAMA_3,
    "llama3": _LLAMA_3,
    "qwen2": _QWEN_2,
    "qwen35": _QWEN_3_5,
}
"""By the name in `tokenizer.ggml.pre`."""


class GgufTokenizer:
    """What a file's `tokenizer.ggml.*` keys say, checked.

    Attributes:
        backend: the tokenizer; control tokens are special, user-defined ones are added tokens.
        bos_id, eos_id: the ids the file names, or None.
        end_ids: all ids that the file names as ends of something: sequence, turn, message.
        add_bos: whether a prompt begins with `bos_id`.

    Raises:
        ModelFileError: for a kind of tokenizer that is not supported, and for malformed keys.
    """

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        model = _value(metadata, "model", str)
        if model != "gpt2":
            raise ModelFileError(f"tokenizer model '{model[:80]}' is not supported, only gpt2 (byte-level BPE)")
        pre = _value(metadata, "pre", str)
        if pre not in PRE_TOKENIZERS:
            raise ModelFileError(
                f"pre-tokenizer '{pre[:80]}' is not supported, only {', '.join(sorted(PRE_TOKENIZERS))}"
            )
        rules = PRE_TOKENIZERS[pre]
        tokens = _list(metadata, "tokens", str)
        self._size = len(tokens)
        self.backend = _backend(tokens, _merges(metadata), _list(metadata, "token_type", int), rules)
        self.bos_id = self._id(metadata, "bos_token_id")
        self.eos_id = self._id(metadata, "eos_token_id")
        ends = (self._id(metadata, f"{kind}_token_id") for kind in ("eos", "eot", "eom"))
        self.end_ids = frozenset(end for end in ends if end is not None)
        add_bos = metadata.get("tokenizer.ggml.add_bos_token", rules.add_bos)
        if not isinstance(add_bos, bool):
            raise ModelFileError("tokenizer.ggml.add_bos_token is not a boolean")
        self.add_bos = add_bos

    def _id(self, metadata: Mapping[str, Any], key: str) -> int | None:
        if f"tokenizer.ggml.{key}" not in metadata:
            return None
        token_id = _value(metadata, key, int)
        if not 0 <= token_id < self._size:
            raise ModelFileError(f"tokenizer.ggml.{key} is {token_id}, outside a vocabulary of {self._size} tokens")
        return token_id


def _backend(tokens: list[str], merges: list[tuple[str, str]], types: list[int], rules: PreTokenizer) -> Tokenizer:
    if len(types) != len(tokens):
        raise ModelFileError(f"tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens")
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise ModelFileError("tokenizer.ggml.tokens lists a token twice")
    try:
        backend = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=rules.ignore_merges))
    except Exception as error:  # the library raises nothing narrower
        raise ModelFileError(f"tokenizer.ggml.merges do not fit the vocabulary: {error}") from error
    if rules.normalizer is not None:
        backend.normalizer = rules.normalizer
    backend.pre_tokenizer = rules.split
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens(
        [
            AddedToken(token, special=kind == _CONTROL, normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind in (_CONTROL, _USER_DEFINED)
        ]
    )
    return backend


def _merges(metadata: Mapping[str, Any]) -> list[tuple[str, str]]:
    merges = []
    for merge in _list(metadata, "merges", str):
        left, _, right = merge.partition(" ")
        merges.append((left, right))
    return merges


def _value(metadata: Mapping[str, Any], key: str, kind: type[_T]) -> _T:
    key = f"tokenizer.ggml.{key}"
    if key not in metadata:
        raise ModelFileError(f"{key} is missing")
    value = metadata[key]
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ModelFileError(f"{key} has the wrong type")
    return value


def _list(metadata: Mapping[str, Any], key: str, kind: type[_T]) -> list[_T]:
    values = _value(metadata, key, list)
    if not all(isinstance(value, kind) for value in values):
        raise ModelFileError(f"tokenizer.ggml.{key} has entries of the wrong type")
    return values
