"""Text processing of a model, read from GGUF files and Hugging Face directories."""

import json
from pathlib import Path

import gguf
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from helexa.core.errors import ModelFileError
from helexa.neuron.text.chat_template import CHATML, TemplateError
from helexa.neuron.text.model_text import ModelText

MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]


def write_directory(path: Path, added: list[str], **files: dict) -> Path:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({letter: index for index, letter in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "<|im_end|>"])
    backend.add_tokens(added)
    backend.save(str(path / "tokenizer.json"))
    files.setdefault("tokenizer_config", {"bos_token": "<s>", "eos_token": "<|im_end|>", "add_bos_token": True})
    for name, value in files.items():
        (path / f"{name}.json").write_text(json.dumps(value))
    return path


def test_smollm2_prompt_equals_transformers(smollm2_gguf, reference_smollm2):
    text = ModelText.open(smollm2_gguf)
    for messages in (
        MESSAGES,
        [{"role": "system", "content": "Né 12"}, *MESSAGES, {"role": "assistant", "content": "P"}],
    ):
        expected = reference_smollm2.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert text.prompt_ids(messages) == expected
    assert (text.capabilities.tool_call, text.capabilities.reasoning) == (False, False)
    assert text.sampling_defaults == {}


def test_folder_with_exactly_one_gguf_file_is_opened_as_a_tokenizer(smollm2_gguf, tmp_path):
    (tmp_path / "model.gguf").symlink_to(smollm2_gguf)
    assert ModelText.open(tmp_path).tokenizer.vocab_size == 49152
    (tmp_path / "other.gguf").symlink_to(smollm2_gguf)
    with pytest.raises(ModelFileError, match=r"2 \.gguf files"):
        ModelText.open(tmp_path)


def test_path_without_a_tokenizer_is_rejected(tmp_path):
    with pytest.raises(ModelFileError, match=r"no \.gguf files"):
        ModelText.open(tmp_path)
    with pytest.raises(ModelFileError, match=r"absent\.gguf"):
        ModelText.open(tmp_path / "absent.gguf")


def write_gguf(path: Path, metadata: dict, templates: object = None) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in metadata.items():
        kind = gguf.GGUFValueType.get_type(value)
        writer.add_key_value(key, value, gguf.GGUFValueType.UINT32 if key.endswith("_id") else kind)
    if templates is not None:
        writer.add_chat_template(templates)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def test_unsupported_vocabulary_is_rejected_by_name(tmp_path, byte_metadata):
    path = write_gguf(tmp_path / "other.gguf", byte_metadata | {"tokenizer.ggml.model": "rwkv"})
    with pytest.raises(ModelFileError, match=r"other\.gguf: .*'rwkv' is not supported.*architecture 'llama'"):
        ModelText.open(path)


def test_templates_and_sampling_defaults_are_read_from_a_gguf_file(tmp_path, byte_metadata):
    templates = [
        {"name": "default", "template": "{{ eos_token }}{{ unk_token is defined }}"},
        {"name": "tool_use", "template": "{{ bos_token }}{{ tools | length }}"},
    ]
    metadata = byte_metadata | {"general.sampling.temp": 0.5, "general.sampling.top_k": 7}
    text = ModelText.open(write_gguf(tmp_path / "model.gguf", metadata, templates))
    assert text.tokenizer.decode(text.prompt_ids(MESSAGES), skip_special=False) == "<|control|>False"
    assert text.tokenizer.decode(text.prompt_ids(MESSAGES, [{}, {}]), skip_special=False) == "<|control|>2"
    assert text.sampling_defaults == {"temperature": 0.5, "top_k": 7}
    assert text.capabilities.tool_call


def test_templates_and_sampling_defaults_are_read_from_a_directory(tmp_path, templates):
    path = write_directory(
        tmp_path,
        ["<think>", "</think>"],
        generation_config={"temperature": 0.6, "top_k": 20, "top_p": None, "min_p": "x", "do_sample": True},
    )
    (path / "chat_template.jinja").write_text(templates["Qwen-Qwen3-0.6B"], encoding="utf-8")
    text = ModelText.open(path)
    assert text.sampling_defaults == {"temperature": 0.6, "top_k": 20}
    assert (text.capabilities.tool_call, text.capabilities.reasoning) == (True, True)
    ids = text.prompt_ids(MESSAGES, enable_thinking=False)
    assert text.tokenizer.decode(ids).endswith("<think>\n\n</think>\n\n")
    tools = [{"type": "function", "function": {"name": "look_up", "parameters": {}}}]
    assert "look_up" in text.tokenizer.decode(text.prompt_ids(MESSAGES, tools))
    templates_by_name = [{"name": "default", "template": "{{ pad_token }}"}, {"name": "tool_use", "template": "calls"}]
    config = {"chat_template": templates_by_name, "pad_token": {"content": "<|im_end|>"}}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    (path / "chat_template.jinja").unlink()
    text = ModelText.open(path)
    assert text.prompt_ids(MESSAGES) == [text.tokenizer.token_id("<|im_end|>")]
    assert text.tokenizer.decode(text.prompt_ids(MESSAGES, tools)) == "calls"


@pytest.mark.parametrize(
    ("added", "template", "tool_call", "reasoning"),
    [
        ([], "x", False, False),
        (["<tool_call>", "</tool_call>"], "x", True, False),
        (["<tool_call>", "<think>"], "x", False, False),
        (["[THINK]", "[/THINK]"], "x", False, True),
        ([], "{% if tools %}{{ tools }}{% endif %}", True, False),
        ([], "{% if enable_thinking is defined %}{% endif %}", False, True),
        ([], "{% if broken %}{{ tools }}", False, False),
    ],
)
def test_tool_call_and_reasoning_capabilities_follow_vocabulary_and_template(
    tmp_path, added, template, tool_call, reasoning
):
    config = {"chat_template": template}
    capabilities = ModelText.open(write_directory(tmp_path, added, tokenizer_config=config)).capabilities
    assert (capabilities.tool_call, capabilities.reasoning) == (tool_call, reasoning)


def test_model_without_a_template_uses_chatml_and_adds_bos(tmp_path):
    text = ModelText.open(write_directory(tmp_path, []))
    assert text.template.source == CHATML
    ids = text.prompt_ids([{"role": "user", "content": None}])
    assert text.tokenizer.decode(ids, skip_special=False) == (
        "<s><|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n"
    )
    assert ids[0] == text.tokenizer.bos_id
    config = {"bos_token": "<s>", "eos_token": "<|im_end|>", "add_bos_token": False, "add_eos_token": True}
    text = ModelText.open(write_directory(tmp_path, [], tokenizer_config=config))
    assert text.tokenizer.decode(text.prompt_ids(MESSAGES), skip_special=False).startswith("<|im_start|>user")
    assert text.prompt_ids(MESSAGES)[-1] != text.tokenizer.eos_id


def test_bos_is_not_added_to_a_prompt_whose_template_writes_it(tmp_path):
    config = {"bos_token": "<s>", "add_bos_token": True, "chat_template": "{{ bos_token }}hi"}
    text = ModelText.open(write_directory(tmp_path, [], tokenizer_config=config))
    assert text.tokenizer.decode(text.prompt_ids(MESSAGES), skip_special=False) == "<s>hi"


@pytest.mark.parametrize(
    "template", ["{% if", "{{ x.y.z }}", "{{" + "(" * 9999, "x" * (2 << 20), "{{ 'x' * 9999999999 }}"]
)
def test_model_with_a_broken_template_loads_and_only_chats_fail(tmp_path, template):
    text = ModelText.open(write_directory(tmp_path, [], tokenizer_config={"chat_template": template}))
    with pytest.raises(TemplateError, match="the chat template"):
        text.prompt_ids(MESSAGES)
    with pytest.raises(TemplateError, match="the chat template"):
        text.prompt_and_turn_start(MESSAGES)[1]
    assert text.tokenizer.encode("x")
