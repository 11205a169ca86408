"""Build the tokenizer that a GGUF file's metadata describes.

The model is byte-level BPE (`gpt2`), SentencePiece BPE (`llama`, `gemma4`) or WordPiece (`bert`). SentencePiece calls a
token a piece. Each piece has a score, `▁` represents a space, and characters without a piece become byte tokens.
"""

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, TypeVar

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from helexa.core.errors import ModelFileError, UnsupportedModelError
from helexa.core.logs import quoted
from helexa.neuron.text.encoder import backend_errors
from helexa.neuron.text.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer
from helexa.neuron.text.tokenizer import AddedText
from helexa.neuron.weights.gguf.header_and_metadata_reader import StringArray, is_list_of
from helexa.neuron.weights.gguf.typed_metadata_and_token_types import TokenType, corrected_types

_log = logging.getLogger("helexa.neuron.text")

MAX_TOKENS = 1 << 20
MAX_MERGES = 1 << 20
MAX_ADDED_LENGTH = 1 << 20  # maximum number of characters in all added tokens; a character takes about 80 bytes

_SHOWN, _SHOWN_LENGTH = 5, 40

_T = TypeVar("_T")

_MODELS = ("bert", "gemma4", "gpt2", "llama")
_END_KINDS = ("eos", "eot", "eom", "fim_pre", "fim_suf", "fim_mid", "fim_pad", "fim_rep", "fim_sep")

MAX_SQUARED_LENGTHS = 1 << 26  # maximum sum of the squared lengths of pieces: the work of `_merges_from_scores`


class GgufVocabulary:
    """The vocabulary in the `tokenizer.ggml.*` keys of a GGUF file's metadata.

    Raises:
        ModelFileError: the tokens or their types are missing or invalid. Each method validates the key that it reads.
    """

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self._metadata = metadata
        tokens = self.entries("tokens", MAX_TOKENS, str)
        # The texts of the tokens by id. Empty tokens get unique names, the same names as in llama.cpp.
        self.tokens = list(tokens)
        for token_id in [token_id for token_id, token in enumerate(tokens) if not token]:
            self.tokens[token_id] = f"[EMPTY_{token_id}]"
        types = self.entries("token_type", MAX_TOKENS, int) if "tokenizer.ggml.token_type" in metadata else None
        if types is not None and len(types) != len(tokens):
            raise ModelFileError(f"tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens")
        self.types = corrected_types(metadata, tokens, types)  # the `TokenType` of each token, by id
        self._warn_of_corrections(tokens, types)
        if not tokens:
            raise ModelFileError("tokenizer.ggml.tokens is empty")
        self.repeated: dict[int, AddedText] = {}  # by id, tokens with the text of an earlier token
        self.ids = dict(zip(self.tokens, range(len(tokens)), strict=True))  # the id of each token, by text
        if len(self.ids) != len(tokens):
            self._rename_repeated()
            self.ids = dict(zip(self.tokens, range(len(tokens)), strict=True))

    def _rename_repeated(self) -> None:
        """Give tokens with the text of an earlier token a name that no text contains.

        Raises:
            ModelFileError: the vocabulary is not one of SentencePiece.
        """
        first: dict[str, int] = {}
        for token_id, token in enumerate(self.tokens):
            if first.setdefault(token, token_id) == token_id:
                continue
            # SentencePiece vocabularies may repeat tokens. For example, Google's Q4_0 files of Gemma 4 have three
            # repeated tokens. In a vocabulary of another type, a repeated token shows that the file is damaged.
            if self._metadata.get("tokenizer.ggml.model") not in ("gemma4", "llama"):
                raise ModelFileError(f"tokenizer.ggml.tokens lists a token twice: {token[:_SHOWN_LENGTH]!r}")
            special = self.types[token_id] in (TokenType.CONTROL, TokenType.UNKNOWN)
            self.repeated[token_id] = AddedText(token, special)
            # The model may generate the token, but its text in a prompt becomes the first token with this text.
            self.tokens[token_id], self.types[token_id] = f"[REPEATED_{token_id}]", int(TokenType.UNUSED)
        _log.warning(
            "model file lists tokens twice model=%s tokens=%d first=%s; prompts use the lowest id of each token",
            _model_name(self._metadata),
            len(self.repeated),
            ",".join(repr(token.content[:_SHOWN_LENGTH]) for token in islice(self.repeated.values(), _SHOWN)),
        )

    def _warn_of_corrections(self, tokens: Sequence[str], types: Sequence[int] | None) -> None:
        before = [int(TokenType.NORMAL)] * len(tokens) if types is None else types
        changed = [
            repr(token[:_SHOWN_LENGTH])
            for token, old, new in zip(tokens, before, self.types, strict=True)
            if old != new and new != TokenType.BYTE
        ]
        if types is None:
            _log.warning(
                "model file has no token types model=%s; control tokens are recognized by their text",
                _model_name(self._metadata),
            )
        if changed:
            names = ",".join(changed[:_SHOWN])
            fields = (_model_name(self._metadata), len(changed), names)
            _log.warning("wrong types of special tokens corrected model=%s tokens=%d first=%s", *fields)

    def added_tokens(self) -> list[AddedToken]:
        """Return the control tokens, the unknown token and user-defined tokens.

        The `tokenizers` library finds these tokens in a text before it tokenizes the rest of the text.
        """
        kinds = {int(kind) for kind in (TokenType.CONTROL, TokenType.UNKNOWN, TokenType.USER_DEFINED)}
        added = [(token, kind) for token, kind in zip(self.tokens, self.types, strict=True) if kind in kinds]
        if sum(len(token) for token, _ in added) > MAX_ADDED_LENGTH:
            raise ModelFileError(
                f"tokenizer.ggml.tokens has added tokens with more than {MAX_ADDED_LENGTH} characters together"
            )
        return [AddedToken(token, special=kind != TokenType.USER_DEFINED, normalized=False) for token, kind in added]

    def merges(self) -> list[tuple[str, str]]:
        """Return pairs of tokens that BPE merges into one token, highest priority first."""
        pairs = (merge.partition(" ") for merge in self.entries("merges", MAX_MERGES, str))
        return [(left, right) for left, _, right in pairs]

    def token_id(self, kind: str) -> int | None:
        """Return the id of the special token `kind`, such as `bos`, or None."""
        key = f"{kind}_token_id"
        if f"tokenizer.ggml.{key}" not in self._metadata:
            return None
        token_id = _gguf_value(self._metadata, key, int)
        if not 0 <= token_id < len(self.tokens):
            raise ModelFileError(
                f"tokenizer.ggml.{key} is {token_id}, outside a vocabulary of {len(self.tokens)} tokens"
            )
        return token_id

    def flag(self, key: str, default: bool) -> bool:
        """Return the boolean at `tokenizer.ggml.{key}`, by default `default`."""
        flag = self._metadata.get(f"tokenizer.ggml.{key}", default)
        if not isinstance(flag, bool):
            raise ModelFileError(f"tokenizer.ggml.{key} is not a boolean, but of type {type(flag).__name__}")
        return flag

    def entries(self, key: str, limit: int, *kinds: type[_T]) -> Sequence[_T]:
        """Return the list `tokenizer.ggml.{key}`; require up to `limit` items of `kinds`."""
        values = _gguf_value(self._metadata, key, list, StringArray)
        if len(values) > limit:
            raise ModelFileError(f"tokenizer.ggml.{key} has {len(values)} entries, more than {limit}")
        if not is_list_of(values, *kinds):
            expected = " or ".join(kind.__name__ for kind in kinds)
            raise ModelFileError(f"tokenizer.ggml.{key} has entries of the wrong type, expected {expected}")
        return values


def _gguf_value(metadata: Mapping[str, Any], key: str, *kinds: type[_T]) -> _T:
    """Return the value at `tokenizer.ggml.{key}` in a GGUF file's metadata.

    Raises:
        ModelFileError: the key is missing, or its value has none of the types `kinds`.
    """
    key = f"tokenizer.ggml.{key}"
    if key not in metadata:
        raise ModelFileError(f"{key} is missing", advice="convert the model again with its tokenizer")
    value = metadata[key]
    if not isinstance(value, kinds) or isinstance(value, bool):
        expected = " or ".join(kind.__name__ for kind in kinds)
        raise ModelFileError(f"{key} has the wrong type {type(value).__name__}, expected {expected}")
    return value


class GgufTokenizer:
    """The tokenizer that the `tokenizer.ggml.*` keys of a GGUF file describe.

    Attributes:
        backend: tokenizer of the `tokenizers` library.
        ids: the id of each token, by text; None if `backend` has other texts than the file (WordPiece).
        repeated: by id, the tokens whose text an earlier token already has.
        bos_id: id of the beginning-of-sequence token, or None if the file has none.
        eos_id: id of the end-of-sequence token, or None if the file has none.
        end_ids: ids of all tokens in the file that end a sequence, a turn, a message or an infill.
        add_bos: whether a prompt begins with `bos_id`.
        add_eos: whether a prompt ends with `eos_id`.

    Raises:
        ModelFileError: the type of tokenizer is not supported, or the value of a key is invalid.
    """

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        model = _gguf_value(metadata, "model", str)
        if model not in _MODELS:
            raise UnsupportedModelError(f"tokenizer model '{model[:80]}' is not supported, only {', '.join(_MODELS)}")
        rules = _rules(metadata) if model == "gpt2" else None
        vocabulary = GgufVocabulary(metadata)
        if rules is not None:
            self.backend, add_bos = _byte_level_backend(vocabulary, rules), rules.add_bos
        elif model == "bert":
            self.backend, add_bos = _wordpiece_backend(vocabulary), False
        else:
            merges = _merges_from_scores(vocabulary) if model == "llama" else vocabulary.merges()
            space_prefix = vocabulary.flag("add_space_prefix", model == "llama")
            self.backend, add_bos = _sentencepiece_backend(vocabulary, merges, space_prefix), True
        self.backend.add_tokens(vocabulary.added_tokens())
        self.ids = None if model == "bert" else vocabulary.ids
        self.repeated = vocabulary.repeated
        self.bos_id = vocabulary.token_id("bos")
        self.eos_id = vocabulary.token_id("eos")
        ends = (vocabulary.token_id(kind) for kind in _END_KINDS)
        self.end_ids = frozenset(end for end in ends if end is not None)
        self.add_bos = vocabulary.flag("add_bos_token", add_bos)
        self.add_eos = vocabulary.flag("add_eos_token", False)


def _model_name(metadata: Mapping[str, Any]) -> str:
    return quoted(str(metadata.get("general.name", ""))[:80])


def _rules(metadata: Mapping[str, Any]) -> PreTokenizer:
    if "tokenizer.ggml.pre" not in metadata:
        _log.warning(
            "model file names no pre-tokenizer model=%s; llama.cpp's default rules are used, which may not match the "
            "model, so download a newer conversion",
            _model_name(metadata),
        )
        return PRE_TOKENIZERS["default"]
    pre = _gguf_value(metadata, "pre", str)
    if pre not in PRE_TOKENIZERS:
        raise UnsupportedModelError(
            f"pre-tokenizer '{pre[:80]}' is not supported, only {', '.join(sorted(PRE_TOKENIZERS))}"
        )
    return PRE_TOKENIZERS[pre]


def _byte_level_backend(vocabulary: GgufVocabulary, rules: PreTokenizer) -> Tokenizer:
    merges = vocabulary.merges()
    with backend_errors("tokenizer.ggml.merges do not fit the vocabulary", "the file is damaged"):
        backend = Tokenizer(models.BPE(vocabulary.ids, merges, ignore_merges=rules.ignore_merges))
    if rules.normalizer is not None:
        backend.normalizer = rules.normalizer
    backend.pre_tokenizer = rules.split
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece_backend(vocabulary: GgufVocabulary, merges: list[tuple[str, str]], space_prefix: bool) -> Tokenizer:
    """Return a SentencePiece BPE tokenizer of the `tokenizers` library.

    Args:
        merges: pairs of pieces that become one piece, highest priority first.
        space_prefix: whether a space is added before the text, and before the text after each added token.

    Raises:
        ModelFileError: the merges do not match the vocabulary.
    """
    unknown = vocabulary.tokens[vocabulary.token_id("unknown") or 0]
    with backend_errors("tokenizer.ggml.merges do not fit the vocabulary", "the file is damaged"):
        model = models.BPE(vocabulary.ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    backend = Tokenizer(model)
    prefix = [normalizers.Prepend("▁")] if space_prefix else []
    backend.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return backend


def _merges_from_scores(vocabulary: GgufVocabulary) -> list[tuple[str, str]]:
    """Return the BPE merges that correspond to the scores of pieces, best first.

    SentencePiece merges any two adjacent pieces that together are a piece, and begins with the pair whose merged piece
    has the highest score. The result therefore has one merge for each way to split a piece into two pieces.

    Raises:
        ModelFileError: the scores are invalid, or the pieces are longer than in any real model.
    """
    scores = vocabulary.entries("scores", MAX_TOKENS, float, int)
    if len(scores) != len(vocabulary.tokens):
        raise ModelFileError(f"tokenizer.ggml.scores has {len(scores)} entries for {len(vocabulary.tokens)} tokens")
    if not all(map(math.isfinite, scores)):
        index = next(index for index, score in enumerate(scores) if not math.isfinite(score))
        raise ModelFileError(f"tokenizer.ggml.scores has an entry that is not finite: {scores[index]} of token {index}")
    normal = [token_id for token_id, kind in enumerate(vocabulary.types) if kind == TokenType.NORMAL]
    # The sort is stable, so tokens with equal scores stay in the order of their ids. Converters that do not know the
    # scores write equal scores, and ids in the order of the merges.
    normal.sort(key=scores.__getitem__, reverse=True)
    pieces = [vocabulary.tokens[token_id] for token_id in normal]
    if sum(len(piece) ** 2 for piece in pieces) > MAX_SQUARED_LENGTHS:
        raise ModelFileError("tokenizer.ggml.tokens has pieces that are far longer than those of a real vocabulary")
    merges = list(islice(_splits(pieces), MAX_MERGES + 1))
    if len(merges) > MAX_MERGES:
        raise ModelFileError(f"tokenizer.ggml.tokens needs more than {MAX_MERGES} merges, the maximum")
    return merges


def _splits(pieces: list[str]) -> Iterator[tuple[str, str]]:
    known = set(pieces)
    for piece in pieces:
        for cut in range(len(piece) - 1, 0, -1):
            left = piece[:cut]
            if left in known and (right := piece[cut:]) in known:
                yield left, right


def _wordpiece_backend(vocabulary: GgufVocabulary) -> Tokenizer:
    """Return a WordPiece tokenizer of the `tokenizers` library.

    Raises:
        ModelFileError: two tokens have the same spelling in BERT's vocabulary format.
    """
    spelled = [_spelled(token, kind) for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True)]
    ids = {token: token_id for token_id, token in enumerate(spelled)}
    if len(ids) != len(spelled):
        raise ModelFileError("tokenizer.ggml.tokens lists a token twice")
    backend = Tokenizer(models.WordPiece(ids, unk_token=spelled[vocabulary.token_id("unknown") or 0]))
    lower = vocabulary.flag("normalizer.lowercase", True)
    backend.normalizer = normalizers.BertNormalizer(
        lowercase=lower, strip_accents=vocabulary.flag("normalizer.strip_accents", lower)
    )
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(cleanup=False)
    return backend


def _spelled(token: str, kind: int) -> str:
    # GGUF files mark tokens that begin a word, with `▁`. BERT marks tokens that continue a word, with `##`.
    if kind in (TokenType.CONTROL, TokenType.UNKNOWN):
        return token
    return token[1:] if token.startswith("▁") else f"##{token}"
