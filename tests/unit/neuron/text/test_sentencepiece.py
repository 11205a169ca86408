"""SentencePiece in GGUF metadata, compared with a direct implementation of the algorithm."""

from itertools import pairwise
from typing import Any

import pytest

from helexa.core.errors import ModelFileError
from helexa.neuron.text import gguf_tokenizer
from helexa.neuron.weights.gguf.files import GgufFile
from local_tokenizers import from_gguf
from neuron.text import multilingual


def spm_metadata(pieces: dict[str, float], **keys: Any) -> dict[str, Any]:
    """Return GGUF metadata of a vocabulary: `<unk>` 0, `<s>` 1, `</s>` 2, bytes from 3, `pieces` from 259."""
    keys = {
        "model": "llama",
        "tokens": ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces],
        "token_type": [2, 3, 3, *[6] * 256, *[1] * len(pieces)],
        "scores": [0.0] * 259 + list(pieces.values()),
        "bos_token_id": 1,
        "eos_token_id": 2,
    } | keys
    return {f"tokenizer.ggml.{key}": value for key, value in keys.items()}


def sentencepiece_ids(text: str, ids: dict[str, int], scores: list[float]) -> list[int]:
    """Return the token ids of `text` according to SentencePiece's definition.

    The algorithm repeatedly merges the adjacent pair with the best score; on equal scores, the leftmost pair.
    """
    symbols = list(text)
    while True:
        pairs = [(left + right, place) for place, (left, right) in enumerate(pairwise(symbols))]
        known = [(-scores[ids[piece]], place) for piece, place in pairs if piece in ids]
        if not known:
            break
        _, place = min(known)
        symbols[place : place + 2] = ["".join(symbols[place : place + 2])]
    spelled = [[ids[symbol]] if symbol in ids else [3 + byte for byte in symbol.encode()] for symbol in symbols]
    return [token_id for tokens in spelled for token_id in tokens]


def test_real_vocabulary_encodes_like_the_sentencepiece_library(vocabulary, llama_cpp_models):
    tokenizer = vocabulary("llama-spm")
    metadata = GgufFile.open(llama_cpp_models / "ggml-vocab-llama-spm.gguf").metadata
    ids = {token: token_id for token_id, token in enumerate(metadata["tokenizer.ggml.tokens"]) if token_id > 258}
    for text in multilingual.PIECES[:-1]:
        for line in text.splitlines(keepends=True):
            expected = sentencepiece_ids("▁" + line.replace(" ", "▁"), ids, metadata["tokenizer.ggml.scores"])
            assert tokenizer.encode(line, parse_special=False) == expected, line


def test_unknown_characters_become_byte_tokens():
    tokenizer = from_gguf(spm_metadata({"▁": -2.0, "a": -3.0, "▁a": -1.0}))
    assert tokenizer.encode("aé a") == [261, 3 + 0xC3, 3 + 0xA9, 261]
    assert tokenizer.decode([261, 3 + 0xC3, 3 + 0xA9, 261]) == " aé a"


def test_unknown_characters_without_byte_tokens_become_unk():
    keys = {"tokens": ["?", "▁", "a"], "token_type": [2, 1, 1], "scores": [0.0, 0.0, 0.0]}
    del (metadata := spm_metadata({}, **keys))["tokenizer.ggml.bos_token_id"]
    tokenizer = from_gguf(metadata)
    assert tokenizer.encode("aéé a") == [1, 2, 0, 1, 2]
    assert tokenizer.decode([2, 0, 2]) == "aa"


def test_space_prefix_is_added_to_text_unless_the_file_disables_it():
    pieces = {"▁": -2.0, "a": -3.0, "▁a": -1.0}
    tokenizer = from_gguf(spm_metadata(pieces))
    assert tokenizer.encode("a<s>a</s>") == [261, 1, 261, 2]
    assert tokenizer.encode("", add_special=True) == [1]
    tokenizer = from_gguf(spm_metadata(pieces, add_space_prefix=False, add_bos_token=False))
    assert tokenizer.encode("a<s>a a", add_special=True) == [260, 1, 260, 261]


def test_text_encoded_as_a_continuation_gets_no_space_prefix():
    tokenizer = from_gguf(spm_metadata({"▁": -2.0, "a": -3.0, "▁a": -1.0}))
    assert tokenizer.encode("a<s>a</s>", continues=True) == [260, 1, 260, 2]
    assert tokenizer.encode(" a a", continues=True) == [261, 261]
    literal = tokenizer.encode("a<s>", continues=True, parse_special=False)
    assert tokenizer.decode(literal) == "a<s>"
    assert tokenizer.encode("a<s>a</s>") == [261, 1, 261, 2]


def test_user_defined_tokens_are_not_merged_into_control_tokens():
    pieces = {"<": -4.0, "s": -4.0, ">": -4.0, "<s": -1.0, "s>": -1.0, "x": -4.0, "xx": -4.0, "  ": 0.0}
    metadata = spm_metadata(pieces, add_space_prefix=False)
    metadata["tokenizer.ggml.token_type"][259 + 5 : 259 + 8] = [1, 4, 4]
    tokenizer = from_gguf(metadata)
    assert tokenizer.encode("xxx  <s>") == [265, 264, 266, 1]
    assert tokenizer.encode("<s>", parse_special=False) == [262, 261]
    assert tokenizer.decode([265, 266]) == "xx  "


def test_gemma_4_tokenizer_uses_its_merges_and_no_space_prefix():
    pieces = dict.fromkeys(["▁", "a", "b", "ab", "▁a"], 0.0)
    tokenizer = from_gguf(spm_metadata(pieces, model="gemma4", merges=["▁ a", "a b"]))
    assert tokenizer.encode("ab ab") == [262, 263, 261]
    with pytest.raises(ModelFileError, match="merges do not fit"):
        from_gguf(spm_metadata(pieces, model="gemma4", merges=["a a"]))


def test_second_entry_of_a_repeated_token_is_decoded_but_is_never_encoded(caplog):
    # As in Google's files of Gemma 4 with weights in Q4_0.
    pieces = dict.fromkeys(["▁", "a", "b", "ab", "▁a", "[REPEATED_x]"], 0.0)
    for model in ("gemma4", "llama"):
        metadata = spm_metadata(pieces, model=model, merges=["▁ a", "a b"], add_space_prefix=False)
        metadata["tokenizer.ggml.tokens"] += ["ab", "▁a", "</s>"]
        metadata["tokenizer.ggml.token_type"] += [1, 1, 3]
        metadata["tokenizer.ggml.scores"] += [0.0, 0.0, 0.0]
        tokenizer = from_gguf(metadata)
        assert tokenizer.encode("ab</s>") == [262, 2]
        assert tokenizer.decode([265, 266, 262, 267]) == "ab aab"
        assert tokenizer.decode([267], skip_special=False) == "</s>"
        assert tokenizer.vocab_size == 268
        assert 265 not in tokenizer.encode("[REPEATED_265]")
    assert "model file lists tokens twice model='' tokens=3 first='ab','▁a','</s>';" in caplog.text


def test_pieces_with_equal_scores_are_merged_in_the_order_of_their_ids():
    pieces = dict.fromkeys(["a", "b", "c", "bc", "ab", "abc"], -1000.0)
    tokenizer = from_gguf(spm_metadata(pieces, add_space_prefix=False))
    assert [tokenizer.token_text(token_id) for token_id in tokenizer.encode("abcab")] == ["abc", "ab"]
    assert [tokenizer.token_text(token_id) for token_id in tokenizer.encode("abbc")] == ["ab", "bc"]
    pieces = dict.fromkeys(["a", "b", "c", "bc", "ab"], -1000.0)
    tokenizer = from_gguf(spm_metadata(pieces, add_space_prefix=False))
    assert [tokenizer.token_text(token_id) for token_id in tokenizer.encode("abc")] == ["a", "bc"]


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("scores", None, "tokenizer.ggml.scores is missing"),
        ("scores", [0.0], "1 entries for 260 tokens"),
        ("scores", [0.0] * 259 + [float("nan")], "not finite"),
        ("scores", [0.0] * 259 + [float("inf")], "not finite"),
        ("scores", ["0"] * 260, "entries of the wrong type"),
        ("add_space_prefix", 1, "add_space_prefix is not a boolean"),
        ("unknown_token_id", 260, "unknown_token_id is 260, outside"),
    ],
)
def test_malformed_tokenizer_key_of_a_gguf_file_is_rejected(key, value, problem):
    metadata = spm_metadata({"a": 0.0}, **{key: value})
    if value is None:
        del metadata[f"tokenizer.ggml.{key}"]
    with pytest.raises(ModelFileError, match=problem):
        from_gguf(metadata)


def test_sentencepiece_vocabulary_with_too_long_pieces_is_rejected():
    with pytest.raises(ModelFileError, match="pieces that are far longer"):
        from_gguf(spm_metadata({"a" * 10_000: 0.0}))
    with pytest.raises(ModelFileError, match="pieces that are far longer"):
        from_gguf(spm_metadata({f"{number:0500}": 0.0 for number in range(300)}))


def test_sentencepiece_vocabulary_with_too_many_merges_is_rejected(monkeypatch):
    pieces = {"a" * length: 0.0 for length in range(1, 12)}  # these pieces have 55 splits
    monkeypatch.setattr(gguf_tokenizer, "MAX_MERGES", 55)
    assert from_gguf(spm_metadata(pieces, add_space_prefix=False)).encode("a" * 11) == [269]
    monkeypatch.setattr(gguf_tokenizer, "MAX_MERGES", 54)
    with pytest.raises(ModelFileError, match="more than 54 merges"):
        from_gguf(spm_metadata(pieces))
