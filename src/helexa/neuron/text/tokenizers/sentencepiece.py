"""Build SentencePiece BPE tokenizers from GGUF files: pieces with scores, `▁` for a space, byte tokens as fallback."""

import math
from collections.abc import Iterator
from itertools import islice

from tokenizers import Tokenizer, decoders, models, normalizers

from helexa.core.errors import ModelFileError
from helexa.neuron.text.tokenizers.backend_errors import backend_errors
from helexa.neuron.text.tokenizers.gguf_vocabulary import MAX_MERGES, MAX_TOKENS, GgufVocabulary, TokenType

MAX_SQUARED_LENGTHS = 1 << 26
"""Maximum sum of squared piece lengths, which bounds the characters copied to enumerate all splits."""


def sentencepiece_backend(vocabulary: GgufVocabulary, merges: list[tuple[str, str]], space_prefix: bool) -> Tokenizer:
    """Return a tokenizer that merges characters into pieces.

    Args:
        vocabulary: the pieces.
        merges: the pairs of pieces to merge, in order of priority.
        space_prefix: whether a space is added before each stretch of text between added tokens.

    Raises:
        ModelFileError: the merges do not match the vocabulary.
    """
    unknown = vocabulary.tokens[vocabulary.token_id("unknown") or 0]
    with backend_errors("tokenizer.ggml.merges do not fit the vocabulary"):
        model = models.BPE(vocabulary.ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    backend = Tokenizer(model)
    prefix = [normalizers.Prepend("▁")] if space_prefix else []
    backend.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return backend


def merges_from_scores(vocabulary: GgufVocabulary) -> list[tuple[str, str]]:
    """Return merges that reproduce SentencePiece, which always merges the adjacent pair with the best score.

    Each split of a piece into two pieces is a merge; merges are sorted by the score of the piece. Pieces with equal
    scores are sorted by id, which is the order of the merges in files whose converter did not know the scores.

    Raises:
        ModelFileError: the scores are malformed, or the pieces are longer than in any real model.
    """
    scores = vocabulary.entries("scores", MAX_TOKENS, float, int)
    if len(scores) != len(vocabulary.tokens):
        raise ModelFileError(f"tokenizer.ggml.scores has {len(scores)} entries for {len(vocabulary.tokens)} tokens")
    if not all(map(math.isfinite, scores)):
        raise ModelFileError("tokenizer.ggml.scores has an entry that is not finite")
    normal = [token_id for token_id, kind in enumerate(vocabulary.types) if kind == TokenType.NORMAL]
    normal.sort(key=scores.__getitem__, reverse=True)
    pieces = [vocabulary.tokens[token_id] for token_id in normal]
    if sum(len(piece) ** 2 for piece in pieces) > MAX_SQUARED_LENGTHS:
        raise ModelFileError("tokenizer.ggml.tokens has pieces that are far longer than those of a real vocabulary")
    merges = list(islice(_splits(pieces), MAX_MERGES + 1))
    if len(merges) > MAX_MERGES:
        raise ModelFileError(f"tokenizer.ggml.tokens yields more than {MAX_MERGES} merges")
    return merges


def _splits(pieces: list[str]) -> Iterator[tuple[str, str]]:
    known = set(pieces)
    for piece in pieces:
        for cut in range(len(piece) - 1, 0, -1):
            left = piece[:cut]
            if left in known and (right := piece[cut:]) in known:
                yield left, right
