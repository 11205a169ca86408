"""WordPiece in GGUF metadata. llama.cpp's test vectors are checked in test_gguf_tokenizer.py."""

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, normalizers, pre_tokenizers

from helexa.core.errors import ModelFileError
from helexa.neuron.weights.gguf.files import GgufFile
from local_tokenizers import from_gguf
from neuron.text import multilingual


def test_real_wordpiece_vocabulary_encodes_like_bert(vocabulary, llama_cpp_models):
    metadata = GgufFile.open(llama_cpp_models / "ggml-vocab-bert-bge.gguf").metadata
    named = {"[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"}
    spelled = [
        token if token in named else token[1:] if token[0] == "▁" else f"##{token}"
        for token in metadata["tokenizer.ggml.tokens"]
    ]
    library = Backend(models.WordPiece({token: index for index, token in enumerate(spelled)}, unk_token="[UNK]"))
    library.normalizer = normalizers.BertNormalizer()
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer = vocabulary("bert-bge")
    for text in multilingual.PIECES:
        assert tokenizer.encode(text, parse_special=False) == library.encode(text).ids


def small(*tokens: str, **keys: object) -> dict[str, object]:
    keys = {"model": "bert", "tokens": ["[UNK]", *tokens], "token_type": [3, *[1] * len(tokens)]} | keys
    return {f"tokenizer.ggml.{key}": value for key, value in keys.items()}


def test_words_are_split_into_pieces_of_the_wordpiece_vocabulary():
    tokenizer = from_gguf(small("▁un", "happy", "▁happy", "▁!"))
    assert tokenizer.encode("unhappy happy!") == [1, 2, 3, 4]
    assert tokenizer.encode("Unhappy sad") == [1, 2, 0]
    assert tokenizer.decode([1, 2, 3, 4]) == " unhappy happy !"


def test_lower_case_and_removal_of_accents_follow_the_gguf_metadata():
    assert from_gguf(small("▁e", "▁É")).encode("É") == [1]
    keys = {"normalizer.lowercase": False}
    assert from_gguf(small("▁e", "▁É", **keys)).encode("É") == [2]
    keys["normalizer.strip_accents"] = True
    assert from_gguf(small("▁e", "▁E", **keys)).encode("É") == [2]


def test_two_tokens_with_the_same_spelling_are_rejected():
    with pytest.raises(ModelFileError, match="lists a token twice"):
        from_gguf(small("a", "▁##a"))
