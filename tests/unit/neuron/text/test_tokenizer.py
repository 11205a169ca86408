"""Tokenizers of Hugging Face directories, compared with the `tokenizers` library; malformed files are rejected."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer

from helexa.core.errors import ModelFileError
from local_tokenizers import from_directory
from neuron.text import multilingual


def test_tokenizer_of_a_real_directory_encodes_like_the_library(deepseek_v4):
    tokenizer = from_directory(deepseek_v4)
    library = Backend.from_file(str(deepseek_v4 / "tokenizer.json"))
    for text in multilingual.PIECES:
        ids = library.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids, skip_special=False) == text
    ends = ("<｜end▁of▁sentence｜>", "<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>")
    assert tokenizer.eos_ids == {tokenizer.token_id(end) for end in ends}


def test_smollm2_encodes_like_transformers(reference_smollm2, smollm2):
    for text in multilingual.PIECES:
        # see test_smollm2_tokenizer_encodes_each_digit_separately
        if not any(character.isnumeric() for character in text):
            ids = reference_smollm2.encode(text, add_special_tokens=False)
            assert smollm2.encode(text) == ids, text
            for skip in (True, False):
                assert smollm2.decode(ids, skip_special=skip) == reference_smollm2.decode(
                    ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
                )


def test_smollm2_tokenizer_encodes_each_digit_separately(smollm2):
    # The rule applies to digits of every script. transformers ignores the rule when it reads the GGUF file.
    for text in ("٣٤", "½Ⅷ", "12"):
        assert smollm2.encode(text) == [token for digit in text for token in smollm2.encode(digit)]


def test_smollm2_tokenizer_has_the_expected_vocabulary_size_and_special_tokens(smollm2):
    assert smollm2.vocab_size == 49152
    assert (smollm2.bos_id, smollm2.eos_id, smollm2.eos_ids) == (1, 2, {0, *range(2, 8)})  # 3 to 7: infilling
    assert smollm2.encode("x", add_special=True) == smollm2.encode("x")


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
    # Added tokens are outside the model's vocabulary, like Qwen's control tokens.
    backend.add_special_tokens(["<s>", "</s>", "<|im_end|>"])
    backend.add_tokens(["<think>"])
    return backend


def test_special_tokens_are_read_from_the_tokenizer_files_of_a_directory(tmp_path):
    path = write_directory(
        tmp_path,
        byte_level_backend(),
        tokenizer_config={"bos_token": {"content": "<s>"}, "eos_token": "</s>", "add_bos_token": True},
        generation_config={"eos_token_id": [3, 257, 999, "x"]},
    )
    tokenizer = from_directory(path)
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.eos_ids) == (256, 257, {3, 257, 258})
    assert tokenizer.encode("é<think>", add_special=True)[0] == 256
    assert tokenizer.decode(tokenizer.encode("é<think></s>")) == "é<think>"
    literal = tokenizer.encode("</s><think>", parse_special=False)
    assert literal[-1] == 259 == tokenizer.encode("<think>")[0]
    assert tokenizer.decode(literal) == "</s><think>"


def test_directory_without_configuration_files_has_no_special_tokens(tmp_path):
    backend = byte_level_backend()
    backend.enable_truncation(2)
    backend.enable_padding(length=9)
    tokenizer = from_directory(write_directory(tmp_path, backend))
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.eos_ids) == (None, None, {258})
    assert len(tokenizer.encode("abc", add_special=True)) == 3


def test_eos_token_is_read_from_special_tokens_map_json(tmp_path):
    path = write_directory(tmp_path, byte_level_backend(), special_tokens_map={"eos_token": {"content": "</s>"}})
    assert from_directory(path).eos_id == 257


def test_bos_is_added_if_the_post_processor_adds_it(tmp_path):
    backend = byte_level_backend()
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    tokenizer = from_directory(write_directory(tmp_path, backend, tokenizer_config={"bos_token": "<s>"}))
    assert tokenizer.encode("a", add_special=True) == [256, *tokenizer.encode("a")]


@pytest.mark.parametrize(
    ("single", "text", "offsets"),
    [
        ("<s> $A", "<s>a", [0, 3]),
        ("<s> $A <|im_end|>", "<s>a", [0, 3, 4]),
        ("<|im_end|> <s> $A", "<|im_end|><s>a", [0, 10, 13]),
        ("<|im_end|> <s> $A", "<s>a", [0, 0, 0, 3]),
    ],
)
def test_text_that_begins_with_bos_gets_no_second_bos(
    tmp_path: Path, single: str, text: str, offsets: list[int]
) -> None:
    """Programs render chat templates themselves, and send the result as the prompt of a text completion."""
    backend = byte_level_backend()
    ids = {"<s>": 256, "<|im_end|>": 258}
    backend.post_processor = processors.TemplateProcessing(single=single, special_tokens=list(ids.items()))
    tokenizer = from_directory(write_directory(tmp_path, backend, tokenizer_config={"bos_token": "<s>"}))
    prompt = tokenizer.encode(text, add_special=True)
    assert len(prompt) == len(offsets)
    if len(text) == offsets[len(tokenizer.prefix)] + 1:
        assert prompt == tokenizer.encode("a", add_special=True)
    assert tokenizer.offsets(text) == offsets


@pytest.mark.parametrize(
    ("single", "text", "inner", "offsets"),
    [
        ("$A <|im_end|>", "a<|im_end|>", "a", [0, 1]),
        ("<s> $A <|im_end|>", "a<|im_end|>", "a", [0, 0, 1]),
        ("<s> $A <|im_end|>", "<s>a<|im_end|>", "a", [0, 3, 4]),
        ("<|im_end|> $A <|im_end|>", "<|im_end|>", "", [0, 10]),
    ],
)
def test_text_that_already_ends_with_the_end_token_gets_no_second_end_token(
    tmp_path: Path, single: str, text: str, inner: str, offsets: list[int]
) -> None:
    backend = byte_level_backend()
    ids = {"<s>": 256, "<|im_end|>": 258}
    backend.post_processor = processors.TemplateProcessing(single=single, special_tokens=list(ids.items()))
    tokenizer = from_directory(write_directory(tmp_path, backend, tokenizer_config={"bos_token": "<s>"}))
    assert tokenizer.encode(text, add_special=True) == tokenizer.encode(inner, add_special=True)
    assert tokenizer.offsets(text) == offsets


def test_offsets_count_both_characters_of_a_surrogate_pair(tmp_path: Path) -> None:
    tokenizer = from_directory(write_directory(tmp_path, byte_level_backend()))
    text = "a\ud83d\ude00b\ud800c\ud83d\ude00"
    assert tokenizer.decode(tokenizer.encode(text)) == "a\U0001f600b\ufffdc\U0001f600"
    assert tokenizer.offsets(text) == [0, *[1] * 4, 3, *[4] * 3, 5, *[6] * 4]


def test_tokenizer_files_decide_whether_eos_is_added_to_a_text(tmp_path):
    backend = byte_level_backend()
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 256), ("</s>", 257)]
    )
    names = {"bos_token": "<s>", "eos_token": "</s>"}
    path = write_directory(tmp_path, backend, tokenizer_config=names)
    tokenizer = from_directory(path)
    assert tokenizer.encode("a", add_special=True) == [256, *tokenizer.encode("a"), 257]
    write_directory(tmp_path, backend, tokenizer_config=names | {"add_bos_token": False, "add_eos_token": False})
    assert from_directory(path).encode("a", add_special=True) == tokenizer.encode("a")


@pytest.mark.parametrize("single", ["$A <|im_end|>", "<|im_end|> <s> $A", "<s> $A </s> <|im_end|>"])
def test_tokens_that_the_post_processor_adds_need_not_be_bos_and_eos(tmp_path: Path, single: str) -> None:
    # Qwen3-Embedding ends texts with its padding token, and GLM-4 begins them with two tokens.
    backend = byte_level_backend()
    ids = {"<s>": 256, "</s>": 257, "<|im_end|>": 258}
    backend.post_processor = processors.TemplateProcessing(single=single, special_tokens=list(ids.items()))
    tokenizer = from_directory(write_directory(tmp_path, backend, tokenizer_config={"eos_token": "</s>"}))
    for text in ("", "a", "ab"):
        expected = backend.encode(text, add_special_tokens=True)
        assert tokenizer.encode(text, add_special=True) == expected.ids
        first = expected.special_tokens_mask[: expected.special_tokens_mask.index(0)] if text else []
        if text:
            assert tokenizer.offsets(text) == [
                *[0] * len(first),
                *range(len(text)),
                *[len(text)] * (len(expected) - len(first) - len(text)),
            ]


def test_flags_add_bos_token_and_add_eos_token_override_the_post_processor(tmp_path: Path) -> None:
    backend = byte_level_backend()
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A <|im_end|>", special_tokens=[("<s>", 256), ("<|im_end|>", 258)]
    )
    names = {"bos_token": "<s>", "eos_token": "</s>"}
    path = write_directory(tmp_path, backend, tokenizer_config=names | {"add_bos_token": False})
    assert from_directory(path).encode("a", add_special=True)[1:] == [258]
    write_directory(tmp_path, backend, tokenizer_config=names | {"add_eos_token": True})
    assert from_directory(path).encode("a", add_special=True)[::2] == [256, 257]


def token(content: str, **flags: bool) -> dict[str, Any]:
    return {"content": content, "lstrip": False, "rstrip": False, "normalized": False, "single_word": False} | flags


def test_added_tokens_that_only_tokenizer_config_lists_are_in_the_vocabulary(tmp_path: Path) -> None:
    decoder = {
        "72": token("i", special=False),  # has this id in the vocabulary
        "258": token("<|im_end|>", special=False),  # tokenizer.json decides
        "260": token("<|tool|>", special=True),
        "261": token("<note>", special=False),
    }
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "added_tokens_decoder": decoder}
    tokenizer = from_directory(write_directory(tmp_path, byte_level_backend(), tokenizer_config=config))
    reference = AutoTokenizer.from_pretrained(tmp_path)
    for text in ("<|tool|>ab<note> i", "<|im_end|>"):
        assert tokenizer.encode(text) == reference.encode(text)
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == reference.decode(ids, skip_special_tokens=True)
    assert tokenizer.encode("<|tool|><note>") == [260, 261]
    assert tokenizer.decode([260, 261, 258]) == "<note>"
    assert tokenizer.vocab_size == 262


def test_added_tokens_json_is_used_unless_tokenizer_config_lists_added_tokens(tmp_path: Path) -> None:
    config: dict[str, Any] = {"eos_token": "<|tool|>", "additional_special_tokens": ["<|call|>"]}
    legacy = {"<|tool|>": 260, "<|call|>": 261, "<note>": 262}
    path = write_directory(tmp_path, byte_level_backend(), tokenizer_config=config, added_tokens=legacy)
    tokenizer = from_directory(path)
    assert tokenizer.encode("<|tool|><|call|><note>") == [260, 261, 262]
    assert tokenizer.decode([260, 261, 262]) == "<note>"
    assert tokenizer.eos_id == 260
    write_directory(tmp_path, byte_level_backend(), tokenizer_config=config | {"added_tokens_decoder": {}})
    assert from_directory(path).vocab_size == 260


@pytest.mark.parametrize(
    "decoder",
    [
        {"300": token("<far>")},
        {"72": token("<|tool|>")},
        {"260": token("")},
        {"260": "<|tool|>", "x": token("<x>"), "²": token("<y>"), "-1": token("<z>"), "261": {"content": 3}},
        ["<|tool|>"],
    ],
)
def test_added_tokens_without_a_valid_id_or_text_are_left_out(tmp_path: Path, decoder: Any) -> None:
    config = {"added_tokens_decoder": decoder}
    tokenizer = from_directory(write_directory(tmp_path, byte_level_backend(), tokenizer_config=config))
    assert tokenizer.vocab_size == 260


def test_tokenizer_with_too_long_added_tokens_is_rejected(tmp_path: Path) -> None:
    config = {"added_tokens_decoder": {"260": token("x" * (1 << 20)), "261": token("y")}}
    with pytest.raises(ModelFileError, match="add tokens with more than"):
        from_directory(write_directory(tmp_path, byte_level_backend(), tokenizer_config=config))


@pytest.mark.parametrize(
    ("files", "ends"),
    [
        ({"generation_config": {"eos_token_id": [3, 4]}, "config": {"eos_token_id": 5}}, {3, 4, 258}),
        ({"generation_config": {"eos_token_id": None}, "config": {"eos_token_id": [5, 6]}}, {5, 6, 258}),
        ({"generation_config": "{", "config": {"text_config": {"eos_token_id": 7}}}, {7, 258}),
        ({"config": {"eos_token_id": [True, -1, 5000, "x", 2.0], "text_config": []}}, {258}),
    ],
)
def test_end_tokens_are_read_from_the_first_configuration_file_that_lists_any(tmp_path, files, ends):
    assert from_directory(write_directory(tmp_path, byte_level_backend(), **files)).eos_ids == ends


def test_text_of_a_special_token_is_not_normalized(tmp_path):
    # The library's normalized text of the token would be '▁</s>', as in the first Llama 2 files.
    backend = Backend(models.BPE({"</s>": 0, "▁": 1, "a": 2}, []))
    backend.normalizer = normalizers.Prepend("▁")
    backend.decoder = decoders.ByteFallback()
    backend.add_special_tokens([AddedToken("</s>", normalized=True)])
    tokenizer = from_directory(write_directory(tmp_path, backend, tokenizer_config={"eos_token": "</s>"}))
    assert tokenizer.token_text(tokenizer.eos_id) == "</s>"


def test_added_tokens_that_consist_of_spaces_decode_to_spaces(tmp_path):
    # In Gemma's files, runs of spaces are both pieces and added tokens.
    backend = Backend(models.BPE({"▁": 0, "▁▁": 1, "a": 2}, [("▁", "▁")]))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_tokens([AddedToken("▁▁", normalized=False)])
    tokenizer = from_directory(write_directory(tmp_path, backend))
    assert tokenizer.encode("a  a") == [2, 1, 2]
    assert tokenizer.decode([2, 1, 2]) == "a  a"


def test_sentencepiece_byte_tokens_are_decoded(tmp_path):
    vocabulary = {"<unk>": 0, "<0xC3>": 1, "<0xA9>": 2, "▁": 3, "a": 4, "▁a": 5, "<0xZZ>": 6}
    backend = Backend(models.BPE(vocabulary, [("▁", "a")], unk_token="<unk>", byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = from_directory(write_directory(tmp_path, backend))
    assert tokenizer.encode("aé a") == [5, 1, 2, 5]
    assert tokenizer.decode([5, 1, 2, 5, 6]) == " aé a<0xZZ>"
    assert tokenizer.token_bytes(1) == b"\xc3"


def test_invalid_generation_config_is_ignored(tmp_path):
    path = write_directory(tmp_path, byte_level_backend(), generation_config="{")
    assert from_directory(path).eos_ids == {258}


def test_missing_or_malformed_tokenizer_files_are_rejected(tmp_path):
    with pytest.raises(ModelFileError, match=r"tokenizer\.json"):
        from_directory(tmp_path)
    (tmp_path / "tokenizer.json").write_text("[]")
    with pytest.raises(ModelFileError, match=r"tokenizer\.json"):
        from_directory(tmp_path)
    for config in ("{", "[]", "\x00"):
        write_directory(tmp_path, byte_level_backend(), tokenizer_config=config)
        with pytest.raises(ModelFileError, match=r"tokenizer_config\.json"):
            from_directory(tmp_path)


def test_unsupported_decoder_is_rejected(tmp_path):
    backend = byte_level_backend()
    for decoder, problem in ((decoders.CTC(), "CTC is not supported"), (None, "none is not supported")):
        backend.decoder = decoder
        with pytest.raises(ModelFileError, match=problem):
            from_directory(write_directory(tmp_path, backend))


def test_tokenizer_file_that_makes_the_library_panic_is_rejected(tmp_path: Path) -> None:
    model = {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"], "continuing_subword_prefix": "####"}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))
    with pytest.raises(ModelFileError, match=r"^tokenizer\.json cannot be read: "):
        from_directory(tmp_path)


def mutated(**replaced: Any) -> str:
    """Return a valid tokenizer.json with the given top-level keys replaced."""
    return json.dumps(json.loads(byte_level_backend().to_str()) | replaced)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (byte_level_backend().to_str()[:-1], "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ("{}", "cannot be read"),
        (json.dumps({"a": [[]] * (1 << 21)}), "values"),
        (
            mutated(added_tokens=[{"id": 9, "content": "x" * (1 << 20), "special": True}] * 2),
            "added tokens with more than",
        ),
        (mutated(added_tokens=[7]), "cannot be read"),
        (mutated(added_tokens={}), "cannot be read"),
        (mutated(model=[]), "cannot be read"),
        (mutated(model={"type": "BPE", "vocab": {"a": -1}, "merges": []}), "cannot be read"),
        (mutated(model={"type": "BPE", "vocab": {"a": 0}, "merges": ["a b"]}), "cannot be read"),
        (mutated(model={"type": "Unigram", "vocab": [["a", 0.0]], "unk_id": 7}), "cannot be read"),
        (mutated(pre_tokenizer={"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated"}), "cannot be read"),
        (mutated(post_processor={"type": "TemplateProcessing", "single": [], "pair": []}), "cannot be read"),
        (
            mutated(
                post_processor={
                    "type": "TemplateProcessing",
                    "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}],
                    "pair": [],
                    "special_tokens": {},
                }
            ),
            "cannot be used",
        ),
        (mutated(decoder={"type": "Fuse"}), "decoder Fuse is not supported"),
    ],
)
def test_hostile_tokenizer_json_is_rejected_with_a_one_line_error(tmp_path, text, problem):
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(ModelFileError, match=problem) as caught:
        from_directory(tmp_path)
    assert "\n" not in str(caught.value)


def test_oversized_tokenizer_file_is_rejected(tmp_path):
    with (tmp_path / "tokenizer.json").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ModelFileError, match=r"tokenizer\.json is larger than 64 MiB"):
        from_directory(tmp_path)


def test_library_panic_during_encoding_raises_model_file_error(tmp_path):
    rules = {"type": "Replace", "pattern": {"String": ""}, "content": "b"}
    (tmp_path / "tokenizer.json").write_text(mutated(normalizer=rules))
    tokenizer = from_directory(tmp_path)
    with pytest.raises(ModelFileError, match="the tokenizer fails on this text"):
        tokenizer.encode("é🚀 a")
