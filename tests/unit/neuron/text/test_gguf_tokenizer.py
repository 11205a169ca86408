"""Tokenizers in GGUF metadata: llama.cpp's test vectors, a reference of each algorithm, and malformed keys."""

import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders

from helexa.core.errors import ModelFileError
from helexa.neuron.text.gguf_tokenizer import MAX_ADDED_LENGTH, MAX_MERGES, MAX_TOKENS
from helexa.neuron.text.pre_tokenizers import PRE_TOKENIZERS
from local_tokenizers import from_gguf
from neuron.text import multilingual

BYTE_LEVEL = [
    *(
        "gpt-2",
        "llama-bpe",
        "qwen2",
        "qwen35",
        "deepseek-llm",
        "deepseek-coder",
        "falcon",
        "mpt",
        "starcoder",
        "refact",
    ),
    "command-r",
]


@pytest.mark.parametrize("name", [*BYTE_LEVEL, "llama-spm", "phi-3", "gemma-4", "bert-bge"])
def test_encoding_equals_llama_cpp_test_vectors(name, vocabulary, llama_cpp_models):
    tokenizer = vocabulary(name)
    stem = llama_cpp_models / f"ggml-vocab-{name}.gguf"
    texts = Path(f"{stem}.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
    lines = Path(f"{stem}.out").read_text().split("\n")
    assert len(lines) - len(texts) in (0, 1)
    for text, line in zip(texts, lines, strict=False):
        # The test vectors of qwen35 lack the NFC normalization of Qwen3.5's tokenizer.
        if name != "qwen35" or unicodedata.is_normalized("NFC", text):
            ids = [int(token) for token in line.split()]
            assert tokenizer.encode(text) == ids, text
            if name != "bert-bge":  # WordPiece does not preserve case and spaces
                assert tokenizer.decode(ids) in (text, f" {text}")


@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS))
def test_decoding_the_tokens_of_a_text_restores_the_text(pre, byte_metadata):
    tokenizer = from_gguf(byte_metadata | {"tokenizer.ggml.pre": pre})
    text = unicodedata.normalize("NFC", multilingual.TEXT)
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize(
    ("names", "text", "pieces"),
    [
        ("llama-bpe smaug-bpe glm4 gpt-4o deepseek-v3 kimi-k2 minicpm5", "a 12345", "a| |123|45"),
        ("qwen2 qwen35 bailingmoe seed-coder hunyuan tekken", "a 123", "a| |1|2|3"),
        ("starcoder smollm command-r viking deepseek-coder deepseek-llm", "a12", "a|1|2"),
        ("gpt-2 mpt", "a 12345", "a| 12345"),
        ("falcon", "a 12345", "a| |123|45"),
        ("falcon3", "a 123", "a| |1|2|3"),
        ("default", "a 12345", "a| |123|45"),
        ("falcon falcon3 default", "a,=b", "a|,=|b"),
        ("llama-bpe qwen2 bailingmoe deepseek-v3", "a!\n\n", "a|!\n\n"),
        ("seed-coder", "a!\n\n", "a|!|\n\n"),
        ("tekken gpt-4o", "a!\n/", "a|!\n/"),
        ("kimi-k2", "a!\n/", "a|!\n|/"),
        ("llama-bpe qwen2 seed-coder", "a\n\nb", "a|\n\n|b"),
        ("bailingmoe qwen2", "a\n \nb", "a|\n \n|b"),
        ("falcon", "a `", "a| |`"),
        ("default", "a `", "a| `"),
        ("deepseek-llm", "🚀  ", "🚀|  "),
        ("mpt command-r qwen2 stablelm2", "e\u0301", "é"),
        ("gpt-2 starcoder hunyuan llama-bpe", "e\u0301", "e|\u0301"),
        ("tekken gpt-4o kimi-k2", "camelCase", "camel|Case"),
        ("llama-bpe qwen2", "camelCase", "camelCase"),
        ("gpt-4o kimi-k2", "we'Re", "we'Re"),
        ("tekken", "we're", "we|'re"),
        ("llama-bpe qwen2 bailingmoe", "WE'RE", "WE|'RE"),
        ("gpt-2 smollm", "WE'RE", "WE|'|RE"),
        ("kimi-k2", "a中b", "a|中|b"),
        ("deepseek-v3 deepseek-llm", "中ア中", "中ア中"),
        ("qwen35", "e\u0323x", "ẹx"),
        ("qwen35", "x\u0323\u0324", "x\u0323\u0324"),
        ("qwen2", "x\u0323\u0324", "x|\u0323\u0324"),
        ("bloom viking poro-chat", "a b,c", "a| b|,|c"),
        ("minicpm5", "a 1", "a| |1"),
    ],
)
def test_each_pre_tokenizer_splits_text_as_in_llama_cpp(names, text, pieces):
    for name in names.split():
        rules = PRE_TOKENIZERS[name]
        normal = text if rules.normalizer is None else rules.normalizer.normalize_str(text)
        cut = [decoders.ByteLevel().decode([piece]) for piece, _ in rules.split.pre_tokenize_str(normal)]
        assert "|".join(cut) == pieces, name


def test_gguf_encoding_of_deepseek_v3_equals_that_of_its_tokenizer_json(deepseek_v4):
    path = deepseek_v4 / "tokenizer.json"
    file, library = json.loads(path.read_text(encoding="utf-8")), Backend.from_file(str(path))
    tokens = {token_id: token for token, token_id in library.get_vocab(with_added_tokens=True).items()}
    types = dict.fromkeys(tokens, 1) | {token["id"]: 3 if token["special"] else 4 for token in file["added_tokens"]}
    tokenizer = from_gguf(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "deepseek-v3",
            "tokenizer.ggml.tokens": [tokens[token_id] for token_id in sorted(tokens)],
            "tokenizer.ggml.token_type": [types[token_id] for token_id in sorted(tokens)],
            "tokenizer.ggml.merges": file["model"]["merges"],
        }
    )
    for text in multilingual.PIECES:
        assert tokenizer.encode(text) == library.encode(text, add_special_tokens=False).ids


def test_gguf_file_without_a_pre_tokenizer_uses_the_default_and_logs_a_message(byte_metadata, caplog):
    del byte_metadata["tokenizer.ggml.pre"]
    unnamed = from_gguf(byte_metadata)
    assert "names no pre-tokenizer" in caplog.text
    default = from_gguf(byte_metadata | {"tokenizer.ggml.pre": "default"})
    assert unnamed.encode(multilingual.TEXT) == default.encode(multilingual.TEXT)


def test_llama_3_prompt_begins_with_bos(vocabulary):
    tokenizer = vocabulary("llama-bpe")
    assert tokenizer.encode("x", add_special=True) == [128000, *tokenizer.encode("x")]
    assert tokenizer.eos_ids == {128001, 128009}


def test_qwen_tokenizer_normalizes_text_to_nfc(vocabulary):
    assert vocabulary("qwen2").encode("e\u0301") == vocabulary("qwen2").encode("é")


def test_control_and_user_defined_tokens_are_encoded_as_single_tokens(byte_metadata):
    tokenizer = from_gguf(byte_metadata)
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


def test_text_of_control_tokens_can_be_encoded_as_plain_text(byte_metadata):
    tokenizer = from_gguf(byte_metadata)
    ids = tokenizer.encode("he<|control|><mark é>", parse_special=False)
    assert 257 not in ids
    assert ids[-1] == 258
    assert tokenizer.decode(ids) == "he<|control|><mark é>"
    assert tokenizer.encode("<|control|>") == [257]


def test_every_byte_has_a_token_in_a_byte_level_vocabulary(byte_metadata):
    tokenizer = from_gguf(byte_metadata)
    assert {tokenizer.token_bytes(token_id) for token_id in range(256)} == {bytes([byte]) for byte in range(256)}


def test_token_ids_outside_the_vocabulary_have_no_text(byte_metadata):
    tokenizer = from_gguf(byte_metadata)
    assert tokenizer.decode([-1, 260, 1 << 31]) == ""
    assert tokenizer.token_text(-1) is tokenizer.token_text(260) is tokenizer.token_text(None) is None


def test_half_of_a_surrogate_pair_is_encoded_as_a_replacement_character(byte_metadata):
    tokenizer = from_gguf(byte_metadata)
    assert tokenizer.decode(tokenizer.encode("a\ud800b\U0001f680")) == "a\ufffdb\U0001f680"


def with_keys(metadata: dict[str, Any], **keys: Any) -> dict[str, Any]:
    return metadata | {f"tokenizer.ggml.{key}": value for key, value in keys.items()}


def test_end_tokens_bos_and_eos_are_read_from_gguf_keys(byte_metadata):
    keys = {"eot_token_id": 3, "eom_token_id": 4, "fim_pad_token_id": 5, "add_bos_token": True}
    tokenizer = from_gguf(with_keys(byte_metadata, **keys))
    assert tokenizer.eos_ids == {3, 4, 5, 257, 259}
    assert tokenizer.encode("he", add_special=True) == [257, 256]
    tokenizer = from_gguf(with_keys(byte_metadata, eos_token_id=259, add_eos_token=True))
    assert tokenizer.encode("he", add_special=True) == [256, 259]
    assert tokenizer.encode("he") == [256]


@pytest.mark.parametrize(
    ("names", "ends"),
    [
        (["<|end|>", "<|user|>"], ["<|end|>"]),
        (["<|end|>", "<|return|>", "<|call|>", "<|channel|>"], ["<|return|>", "<|call|>"]),
        (["<|start|>", "<|message|>", "<|eom|>", "<|eot|>"], ["<|eot|>"]),
        (["<|eom|>", "<|eot|>"], ["<|eom|>", "<|eot|>"]),
        (["<end_of_turn>", "<start_of_turn>"], ["<end_of_turn>"]),
        (
            ["<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|vision_pad|>"],
            ["<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"],
        ),
        (["<|fim_prefix|>", "<|file_separator|>", "<start_of_turn>"], ["<|fim_prefix|>", "<|file_separator|>"]),
        (["<fim_prefix>", "<file_sep>", "<issue_start>"], ["<fim_prefix>", "<file_sep>"]),
        (["<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜User｜>"], ["<｜fim▁begin｜>", "<｜fim▁hole｜>"]),
        (["▁<PRE>", "▁<EOT>"], ["▁<PRE>", "▁<EOT>"]),
    ],
)
@pytest.mark.parametrize("kind", [3, 4])
def test_end_tokens_of_a_gguf_vocabulary_are_recognized_by_their_names(byte_metadata, names, ends, kind):
    tokens, types = byte_metadata["tokenizer.ggml.tokens"][:257], byte_metadata["tokenizer.ggml.token_type"][:257]
    keys = {"tokens": [*tokens, *names], "token_type": [*types, *[kind] * len(names)], "eos_token_id": 0}
    tokenizer = from_gguf(with_keys(byte_metadata, **keys))
    assert {tokenizer.token_text(token_id) for token_id in tokenizer.eos_ids - {0}} == set(ends)


NAMES = ["<|im_start|>", "<|im_end|>", "<think>", "<|other|>", "[TAG]"]
TEMPLATE = "<|im_start|>user\n{{ messages[0].content }}<|im_end|>\n<|im_start|>assistant\n<think>\n"


def with_types(metadata: dict[str, Any], types: list[int] | None, template: str = TEMPLATE) -> dict[str, Any]:
    """Return a vocabulary with the tokens in `NAMES` and their types. None removes the types of all tokens."""
    tokens = [*metadata["tokenizer.ggml.tokens"][:257], *NAMES]
    keys = with_keys(metadata, tokens=tokens, bos_token_id=0, eos_token_id=0) | {"tokenizer.chat_template": template}
    if types is None:
        del keys["tokenizer.ggml.token_type"]
        return keys
    return with_keys(keys, token_type=[*metadata["tokenizer.ggml.token_type"][:257], *types])


@pytest.mark.parametrize("types", [[1] * 5, [5] * 5, [0] * 5, None])
def test_wrong_types_of_control_tokens_in_the_template_are_corrected(byte_metadata, types, caplog):
    tokenizer = from_gguf(with_types(byte_metadata, types))
    assert tokenizer.eos_ids == {0, 258}
    assert tokenizer.encode("<|im_start|><|im_end|><think>") == [257, 258, 259]
    assert tokenizer.decode([257, 258, 259]) == "<think>"
    assert tokenizer.token_bytes(260) == b"<|other|>"  # the template does not use this token
    assert "wrong types of special tokens corrected model='' tokens=3 first='<|im_start|>','<|im_end|>'" in caplog.text
    assert ("no token types" in caplog.text) == (types is None)


def test_end_token_with_a_wrong_type_is_corrected_even_without_a_template(byte_metadata):
    tokenizer = from_gguf(with_types(byte_metadata, [1] * 5, ""))
    assert tokenizer.encode("<|im_end|>") == [258]
    assert len(tokenizer.encode("<|im_start|>")) > 1
    assert tokenizer.eos_ids == {0, 258}


def test_end_token_of_type_user_defined_becomes_a_control_token(byte_metadata):
    tokenizer = from_gguf(with_types(byte_metadata, [4] * 5))
    assert tokenizer.decode([257, 258]) == "<|im_start|>"


def test_wrong_type_of_bos_or_eos_is_corrected_only_for_text_like_a_control_token(byte_metadata):
    metadata = with_keys(with_types(byte_metadata, [1] * 5, ""), eos_token_id=260, bos_token_id=65)
    tokenizer = from_gguf(metadata)
    assert tokenizer.encode("<|other|>") == [260]
    assert tokenizer.decode([65]) != ""


def test_correct_token_types_are_kept_without_a_warning(byte_metadata, caplog):
    tokenizer = from_gguf(with_types(byte_metadata, [3, 3, 4, 3, 1]))
    assert tokenizer.decode([257, 258, 259, 260, 261]) == "<think>[TAG]"
    assert "types" not in caplog.text


def test_gguf_vocabulary_with_several_empty_tokens_is_accepted(byte_metadata):
    tokens = [*byte_metadata["tokenizer.ggml.tokens"], "", ""]
    types = [*byte_metadata["tokenizer.ggml.token_type"], 5, 5]
    tokenizer = from_gguf(with_keys(byte_metadata, tokens=tokens, token_type=types))
    assert tokenizer.vocab_size == 262
    assert tokenizer.encode("he") == [256]


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("model", "rwkv", "'rwkv' is not supported, only bert, gemma4, gpt2, llama"),
        ("model", None, "tokenizer.ggml.model is missing"),
        ("model", 7, "tokenizer.ggml.model has the wrong type"),
        ("pre", "unknown", "'unknown' is not supported"),
        ("pre", 7, "tokenizer.ggml.pre has the wrong type"),
        ("tokens", None, "tokenizer.ggml.tokens is missing"),
        ("tokens", "abc", "tokenizer.ggml.tokens has the wrong type"),
        ("tokens", [1, 2], "tokenizer.ggml.tokens has entries of the wrong type"),
        ("tokens", ["a"] * 260, "lists a token twice"),
        ("tokens", ["a"] * (MAX_TOKENS + 1), "1048577 entries, more than 1048576"),
        ("token_type", [1], "1 entries for 260 tokens"),
        ("token_type", ["1"] * 260, "tokenizer.ggml.token_type has entries of the wrong type"),
        ("merges", None, "tokenizer.ggml.merges is missing"),
        ("merges", [b"h e"], "tokenizer.ggml.merges has entries of the wrong type"),
        ("merges", ["he"], "merges do not fit"),
        ("merges", ["h x y"], "merges do not fit"),
        ("merges", ["h z"], "merges do not fit"),
        ("merges", ["h e"] * (MAX_MERGES + 1), "1048577 entries, more than 1048576"),
        ("bos_token_id", 260, "bos_token_id is 260, outside a vocabulary of 260 tokens"),
        ("eos_token_id", -1, "eos_token_id is -1, outside"),
        ("eot_token_id", "2", "eot_token_id has the wrong type"),
        ("eot_token_id", True, "eot_token_id has the wrong type"),
        ("add_bos_token", 1, "add_bos_token is not a boolean"),
        ("add_eos_token", "yes", "add_eos_token is not a boolean"),
    ],
)
def test_malformed_tokenizer_key_of_a_gguf_file_is_rejected(byte_metadata, key, value, problem):
    byte_metadata[f"tokenizer.ggml.{key}"] = value
    if value is None:
        del byte_metadata[f"tokenizer.ggml.{key}"]
    with pytest.raises(ModelFileError, match=problem) as caught:
        from_gguf(byte_metadata)
    assert "\n" not in str(caught.value)


def test_gguf_file_with_an_empty_vocabulary_is_rejected(byte_metadata):
    with pytest.raises(ModelFileError, match="tokens is empty"):
        from_gguf(with_keys(byte_metadata, tokens=[], token_type=[], merges=[]))


def test_gguf_vocabulary_with_too_long_control_tokens_is_rejected(byte_metadata):
    byte_metadata["tokenizer.ggml.tokens"][257] = "<" * (MAX_ADDED_LENGTH + 1)
    with pytest.raises(ModelFileError, match="added tokens with more than 1048576 characters"):
        from_gguf(byte_metadata)
