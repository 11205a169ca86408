"""Build SentencePiece BPE tokenizers from the vocabularies of GGUF files.

SentencePiece calls a token a piece. Each piece has a score, `▁` represents a space, and characters without a piece are
encoded as byte tokens.
"""

import math
from collections.abc import Iterator
from itertools import islice

from tokenizers import Tokenizer, decoders, models, normalizers

from helexa.core.errors import ModelFileError
from helexa.neuron.text.tokenizers.backend_errors import backend_errors
from helexa.neuron.text.tokenizers.gguf_vocabulary import MAX_MERGES, MAX_TOKENS, GgufVocabulary
from helexa.neuron.weights.gguf.token_types import TokenType

MAX_SQUARED_LENGTHS = 1 << 26
"""Maximum sum of the squared lengths of all pieces. It limits the work of `merges_from_scores`."""


def sentencepiece_backend(vocabulary: GgufVocabulary, merges: list[tuple[str, str]], space_prefix: bool) -> Tokenizer:
    """Return a SentencePiece BPE tokenizer of the `tokenizers` library.

    Args:
        vocabulary: the vocabulary of the GGUF file.
        merges: pairs of pieces that become one piece, highest priority first.
        space_prefix: whether a space is added before the text, and before the text after each added token.

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
    """Return the BPE merges that correspond to the scores of the pieces in `vocabulary`, highest priority first.

    SentencePiece has no list of merges. It merges any two adjacent pieces that together are a piece, and begins with
    the pair whose merged piece has the highest score. The function therefore returns one merge for each way to split a
    piece into two pieces, sorted by the score of the merged piece.

    Merged pieces with equal scores are sorted by id. Converters that do not know the scores write equal scores, and
    assign the ids in the order of the merges.

    Raises:
        ModelFileError: the scores are invalid, or the pieces are longer than in any real model.
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
