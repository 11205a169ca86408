"""Incremental detokenization: every split of the tokens yields the same text."""

import unicodedata

import pytest

from helexa.neuron.text.tokenizer import Detokenizer, Tokenizer
from local_tokenizers import from_gguf
from neuron.text import multilingual

SCRIPTS = "aé߿ࠀ中文한국어ไทยहिन्दीالعربيةРусский🚀👩‍👩‍👧‍👦🇨🇭\U0010ffff\x00\n\t end"


@pytest.fixture
def tokenizer(byte_metadata) -> Tokenizer:
    """Return a tokenizer with one token per byte, so that tokens split every character."""
    return from_gguf(byte_metadata)


def test_detokenized_text_is_the_same_for_every_split_of_the_tokens(tokenizer):
    ids = tokenizer.encode(SCRIPTS)
    assert len(ids) == len(SCRIPTS.encode())
    for cut in range(len(ids) + 1):
        detokenizer = Detokenizer(tokenizer)
        first, second = detokenizer.push(ids[:cut]), detokenizer.push(ids[cut:])
        assert first == SCRIPTS.encode()[:cut].decode(errors="ignore")
        assert first + second == SCRIPTS
        assert detokenizer.flush() == ""


def test_character_is_returned_when_its_last_byte_arrives(tokenizer):
    detokenizer = Detokenizer(tokenizer)
    pushed = [detokenizer.push([token_id]) for token_id in tokenizer.encode("é🚀!")]
    assert pushed == ["", "é", "", "", "", "🚀", "!"]


def test_emoji_that_a_real_vocabulary_splits_are_joined(smollm2):
    text = "rocket 🚀 family 👩‍👩‍👧‍👦 flag 🇨🇭 𓀀 done"
    ids = smollm2.encode(text)
    pieces = [smollm2.decode([token_id]) for token_id in ids]
    assert any("\ufffd" in piece for piece in pieces)
    detokenizer = Detokenizer(smollm2)
    assert "".join(detokenizer.push([token_id]) for token_id in ids) + detokenizer.flush() == text


@pytest.mark.parametrize("name", ["qwen2", "llama-bpe", "llama-spm", "gemma-4", "deepseek-llm"])
def test_text_of_many_scripts_is_decoded_token_by_token(vocabulary, name):
    tokenizer = vocabulary(name)
    for text in multilingual.PIECES:
        normal = unicodedata.normalize("NFC", text) if name == "qwen2" else text
        # SentencePiece decodes its marker `▁` as a space, and may put a space first.
        normal = normal.replace("▁", " ") if name in ("llama-spm", "gemma-4") else normal
        detokenizer = Detokenizer(tokenizer)
        streamed = ""
        for token_id in tokenizer.encode(text, parse_special=False):
            streamed += detokenizer.push([token_id])
            assert f" {normal}".startswith(streamed) or normal.startswith(streamed)
        assert detokenizer.flush() == ""
        assert streamed == (f" {normal}" if name == "llama-spm" else normal)


def test_special_tokens_are_omitted_from_the_text(tokenizer):
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.push([257, *tokenizer.encode("he"), 258, 259, 10_000]) == "he<mark é>"


def test_bytes_are_replaced_as_soon_as_they_cannot_become_valid_utf8(tokenizer):
    rocket = tokenizer.encode("🚀")
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.push(rocket[:2]) == ""
    assert detokenizer.push(tokenizer.encode("a")) == "\ufffda"
    assert detokenizer.push(rocket[3:]) == "\ufffd"
    assert detokenizer.push(rocket) == "🚀"


def test_incomplete_utf8_character_at_the_end_of_the_text_becomes_a_replacement_character(tokenizer):
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.push(tokenizer.encode("x🚀")[:-1]) == "x"
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""
