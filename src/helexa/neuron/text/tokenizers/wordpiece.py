"""Build BERT's WordPiece tokenizers from the vocabularies of GGUF files.

In GGUF files, a token at the beginning of a word has the prefix `▁`, and other tokens have no prefix.
"""

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from helexa.core.errors import ModelFileError
from helexa.neuron.text.tokenizers.gguf_vocabulary import GgufVocabulary
from helexa.neuron.weights.gguf.token_types import TokenType


def wordpiece_backend(vocabulary: GgufVocabulary) -> Tokenizer:
    """Return a WordPiece tokenizer of the `tokenizers` library.

    Unlike in the GGUF file, the tokens are spelled in the usual form: tokens that continue a word have the prefix `##`.

    Raises:
        ModelFileError: two tokens have the same spelling after the conversion.
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
    if kind in (TokenType.CONTROL, TokenType.UNKNOWN):
        return token
    return token[1:] if token.startswith("▁") else f"##{token}"
