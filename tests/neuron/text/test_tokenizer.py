"""Tokenizers against those of others, and against malformed files."""

import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors

from helexa.core.errors import ModelFileError
from helexa.neuron.text.tokenizer import Tokenizer

TEXTS = (
    "The capital of France is",
    "  two  spaces,\ttabs\t\t and\n\n\nlines \r\n of every kind   ",
    "1 12 123 1234 3.14159 2026-11-21",
    "I'll say WE'RE don't 'tis y'all's",
    "naïve façade résumé — “quoted” … ﬁ",
    "日本語のテキスト 한국어 中文。ไทย हिन्दी العربية עברית Ελληνικά Русский",
    "🚀👩‍👩‍👧‍👦🇨🇭 👍🏽 e\u0301 \u200b\ufeff",
    "def f(x):\n    return x ** 2  # squared\n\n\tif (a!=b){c+=1;}",
    "<|im_start|>user\nHi<|im_end|>\n<|endoftext|><|im_start|",
    "",
)


@pytest.mark.parametrize("name", ["gpt-2", "llama-bpe", "qwen2", "qwen35"])
def test_the_test_pairs_of_a_vocabulary(name, vocabulary, llama_cpp_models):
    tokenizer = vocabulary(name)
    stem = llama_cpp_models / f"ggml-vocab-{name}.gguf"
    texts = Path(f"{stem}.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
    expected = [[int(token) for token in line.split()] for line in Path(f"{stem}.out").read_text().split("\n")]
    assert len(texts) == len(expected) > 40
    for text, ids in zip(texts, expected, strict=True):
        # The pairs of qwen35 were made without the NFC that Qwen3.5's own tokenizer begins with.
        if name != "qwen35" or unicodedata.is_normalized("NFC", text):
            assert tokenizer.encode(text) == ids, text
            assert tokenizer.decode(ids) == text


def test_smollm2_is_cut_as_transformers_cuts_it(reference_smollm2, smollm2):
    for text in TEXTS:
        ids = reference_smollm2.encode(text, add_special_tokens=False)
        assert smollm2.encode(text) == ids, text
        for skip in (True, False):
            assert smollm2.decode(ids, skip_special=skip) == reference_smollm2.decode(
                ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
            )


def test_smollm2_cuts_digits_apart(smollm2):
    # Of every script; transformers leaves this rule out when it reads the file.
    for text in ("٣٤", "½Ⅷ", "12"):
        assert smollm2.encode(text) == [token for digit in text for token in smollm2.encode(digit)]


def test_smollm2_knows_its_special_tokens(smollm2):
    assert smollm2.vocab_size == 49152
    assert (smollm2.bos_id, smollm2.eos_id, smollm2.eos_ids) == (1, 2, {0, 2})
    assert smollm2.encode("x", add_special=True) == smollm2.encode("x")


def test_llama_3_begins_with_its_first_token(vocabulary):
    tokenizer = vocabulary("llama-bpe")
    assert tokenizer.encode("x", add_special=True) == [128000, *tokenizer.encode("x")]
    assert tokenizer.eos_ids == {128001, 128009}


def test_qwen_normalizes(vocabulary):
    assert vocabulary("qwen2").encode("e\u0301") == vocabulary("qwen2").encode("é")


def test_control_tokens_and_user_defined_tokens(byte_metadata):
    tokenizer = Tokenizer.from_gguf(byte_metadata)
    ids = tokenizer.encode("he<|control|><mark é>")
    assert ids == [256, 257, 258]
    assert tokenizer.decode(ids) == "he<mark é>"
    assert tokenizer.decode(ids, skip_special=False) == "he<|control|><mark é>"
    assert tokenizer.token_bytes(257) == b""
    assert tokenizer.token_bytes(257, skip_special=False) == b"<|control|>"
    assert tokenizer.token_bytes(258) == "<mark é>".encode()
    assert tokenizer.token_id("<|control|>") == 257
    assert tokenizer.token_id("<control>") is None
    assert tokenizer.token_text(257) == "<|control|>"
    assert tokenizer.eos_ids == {257, 259}


def test_control_tokens_can_stay_plain_text(byte_metadata):
    tokenizer = Tokenizer.from_gguf(byte_metadata)
    ids = tokenizer.encode("he<|control|><mark é>", parse_special=False)
    assert 257 not in ids
    assert ids[-1] == 258
    assert tokenizer.decode(ids) == "he<|control|><mark é>"
    assert tokenizer.encode("<|control|>") == [257]


def test_every_byte_has_its_token(byte_metadata):
    tokenizer = Tokenizer.from_gguf(byte_metadata)
    assert {tokenizer.token_bytes(token_id) for token_id in range(256)} == {bytes([byte]) for byte in range(256)}


def test_ids_outside_the_vocabulary_stand_for_nothing(byte_metadata):
    tokenizer = Tokenizer.from_gguf(byte_metadata)
    assert tokenizer.decode([-1, 260, 1 << 31]) == ""
    assert tokenizer.token_text(-1) is tokenizer.token_text(260) is tokenizer.token_text(None) is None


def test_lone_surrogates_are_replaced(byte_metadata):
    tokenizer = Tokenizer.from_gguf(byte_metadata)
    assert tokenizer.decode(tokenizer.encode("a\ud800b\U0001f680")) == "a\ufffdb\U0001f680"


def test_more_ends_and_the_first_token_from_gguf_keys(byte_metadata):
    keys = {"eot_token_id": 3, "eom_token_id": 4, "add_bos_token": True}
    tokenizer = Tokenizer.from_gguf(byte_metadata | {f"tokenizer.ggml.{key}": value for key, value in keys.items()})
    assert tokenizer.eos_ids == {3, 4, 257, 259}
    assert tokenizer.encode("he", add_special=True) == [257, 256]


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("model", "llama", "'llama' is not supported"),
        ("model", None, "tokenizer.ggml.model is missing"),
        ("model", 7, "tokenizer.ggml.model has the wrong type"),
        ("pre", "chatglm-bpe", "'chatglm-bpe' is not supported"),
        ("pre", None, "tokenizer.ggml.pre is missing"),
        ("tokens", None, "tokenizer.ggml.tokens is missing"),
        ("tokens", "abc", "tokenizer.ggml.tokens has the wrong type"),
        ("tokens", [1, 2], "tokenizer.ggml.tokens has entries of the wrong type"),
        ("tokens", ["a"] * 260, "lists a token twice"),
        ("token_type", [1], "1 entries for 260 tokens"),
        ("token_type", None, "tokenizer.ggml.token_type is missing"),
        ("merges", None, "tokenizer.ggml.merges is missing"),
        ("merges", [b"h e"], "tokenizer.ggml.merges has entries of the wrong type"),
        ("merges", ["he"], "merges do not fit"),
        ("merges", ["h x y"], "merges do not fit"),
        ("merges", ["h z"], "merges do not fit"),
        ("bos_token_id", 260, "bos_token_id is 260, outside a vocabulary of 260 tokens"),
        ("eos_token_id", -1, "eos_token_id is -1, outside"),
        ("eot_token_id", "2", "eot_token_id has the wrong type"),
        ("eot_token_id", True, "eot_token_id has the wrong type"),
        ("add_bos_token", 1, "add_bos_token is not a boolean"),
    ],
)
def test_malformed_gguf_keys(byte_metadata, key, value, says):
    byte_metadata[f"tokenizer.ggml.{key}"] = value
    if value is None:
        del byte_metadata[f"tokenizer.ggml.{key}"]
    with pytest.raises(ModelFileError, match=says) as refused:
        Tokenizer.from_gguf(byte_metadata)
    assert "\n" not in str(refused.value)


def write_directory(path: Path, backend: Backend, **files: Any) -> Path:
    backend.save(str(path / "tokenizer.json"))
    for name, value in files.items():
        (path / f"{name}.json").write_text(value if isinstance(value, str) else json.dumps(value))
    return path


def byte_level_backend() -> Backend:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({letter: index for index, letter in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    # Not in the model's own vocabulary, as Qwen's control tokens are not in theirs.
    backend.add_special_tokens(["<s>", "</s>", "<|im_end|>"])
    backend.add_tokens(["<think>"])
    return backend


def test_a_directory(tmp_path):
    path = write_directory(
        tmp_path,
        byte_level_backend(),
        tokenizer_config={"bos_token": {"content": "<s>"}, "eos_token": "</s>", "add_bos_token": True},
        generation_config={"eos_token_id": [3, 257, 999, "x"]},
    )
    tokenizer = Tokenizer.from_directory(path)
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.eos_ids) == (256, 257, {3, 257, 258})
    assert tokenizer.encode("é<think>", add_special=True)[0] == 256
    assert tokenizer.decode(tokenizer.encode("é<think></s>")) == "é<think>"
    literal = tokenizer.encode("</s><think>", parse_special=False)
    assert literal[-1] == 259 == tokenizer.encode("<think>")[0]
    assert tokenizer.decode(literal) == "</s><think>"


def test_a_directory_that_says_nothing_more(tmp_path):
    backend = byte_level_backend()
    backend.enable_truncation(2)
    backend.enable_padding(length=9)
    tokenizer = Tokenizer.from_directory(write_directory(tmp_path, backend))
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.eos_ids) == (None, None, {258})
    assert len(tokenizer.encode("abc", add_special=True)) == 3


def test_the_special_tokens_map_is_read(tmp_path):
    path = write_directory(tmp_path, byte_level_backend(), special_tokens_map={"eos_token": {"content": "</s>"}})
    assert Tokenizer.from_directory(path).eos_id == 257


def test_the_first_token_as_the_post_processor_has_it(tmp_path):
    backend = byte_level_backend()
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    tokenizer = Tokenizer.from_directory(write_directory(tmp_path, backend, tokenizer_config={"bos_token": "<s>"}))
    assert tokenizer.encode("a", add_special=True) == [256, *tokenizer.encode("a")]


def test_sentencepiece_tokens(tmp_path):
    vocabulary = {"<unk>": 0, "<0xC3>": 1, "<0xA9>": 2, "▁": 3, "a": 4, "▁a": 5, "<0xZZ>": 6}
    backend = Backend(models.BPE(vocabulary, [("▁", "a")], unk_token="<unk>", byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = Tokenizer.from_directory(write_directory(tmp_path, backend))
    assert tokenizer.encode("aé a") == [5, 1, 2, 5]
    assert tokenizer.decode([5, 1, 2, 5, 6]) == " aé a<0xZZ>"
    assert tokenizer.token_bytes(1) == b"\xc3"


def test_a_bad_generation_config_is_only_advice(tmp_path):
    path = write_directory(tmp_path, byte_level_backend(), generation_config="{")
    assert Tokenizer.from_directory(path).eos_ids == {258}


def test_malformed_directories(tmp_path):
    with pytest.raises(ModelFileError, match=r"tokenizer\.json"):
        Tokenizer.from_directory(tmp_path)
    (tmp_path / "tokenizer.json").write_text("[]")
    with pytest.raises(ModelFileError, match=r"tokenizer\.json"):
        Tokenizer.from_directory(tmp_path)
    for config in ("{", "[]", "\x00"):
        write_directory(tmp_path, byte_level_backend(), tokenizer_config=config)
        with pytest.raises(ModelFileError, match=r"tokenizer_config\.json"):
            Tokenizer.from_directory(tmp_path)


def test_other_kinds_of_tokenizer_are_refused(tmp_path):
    backend = Backend(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    with pytest.raises(ModelFileError, match="WordPiece is not supported"):
        Tokenizer.from_directory(write_directory(tmp_path, backend))


def test_a_file_that_makes_the_library_panic_is_refused(tmp_path: Path) -> None:
    model = {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"], "continuing_subword_prefix": "####"}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))
    with pytest.raises(ModelFileError, match=r"^tokenizer\.json cannot be read: "):
        Tokenizer.from_directory(tmp_path)
