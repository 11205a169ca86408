"""Selection of the chat templates in a model's files."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models
from transformers import AutoTokenizer

from helexa.core.errors import ModelFileError
from helexa.neuron.text.settings_and_sampling_defaults import MAX_SOURCE_LENGTH, TemplateSources

NAMED_TEMPLATES = [{"name": "tool_use", "template": "tools of config"}, {"name": "default", "template": "config"}, "x"]


def selected_templates(path: Path) -> tuple[str | None, str | None]:
    sources = TemplateSources.in_directory(path)
    return sources.default, sources.tool_use


def write(path: Path, files: dict[str, object]) -> None:
    for name, content in files.items():
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_text(content if isinstance(content, str) else json.dumps(content))


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config.json": {"chat_template": "config"}},
        {"tokenizer_config.json": {"chat_template": NAMED_TEMPLATES[:2]}},
        {"tokenizer_config.json": {"chat_template": {"default": "config", "tool_use": "tools"}}},
        {"tokenizer_config.json": {"chat_template": NAMED_TEMPLATES[:2]}, "chat_template.jinja": "jinja\r\nfile"},
        {"additional_chat_templates/tool_use.jinja": "more", "chat_template.jinja": "jinja"},
        {
            "tokenizer_config.json": {"chat_template": NAMED_TEMPLATES[:2]},
            "additional_chat_templates/default.jinja": "first",
            "additional_chat_templates/rag.jinja": "rag",
            "chat_template.jinja": "jinja",
        },
    ],
)
def test_selected_template_files_equal_those_of_transformers(tmp_path, files):
    Backend(models.WordLevel({"x": 0}, "x")).save(str(tmp_path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast"}
    files["tokenizer_config.json"] = config | files.get("tokenizer_config.json", {})
    write(tmp_path, files)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    default, tool_use = selected_templates(tmp_path)
    assert default == tokenizer.get_chat_template()
    assert (tool_use or default) == tokenizer.get_chat_template(tools=[{}])


def test_template_files_that_transformers_rejects_are_selected_in_a_fixed_order(tmp_path):
    assert selected_templates(tmp_path) == (None, None)
    write(tmp_path, {"tokenizer_config.json": {"chat_template": NAMED_TEMPLATES}})
    assert selected_templates(tmp_path) == ("config", "tools of config")
    write(tmp_path, {"tokenizer_config.json": {"chat_template": NAMED_TEMPLATES[:1]}})
    assert selected_templates(tmp_path) == ("tools of config", "tools of config")
    write(tmp_path, {"chat_template.json": {"chat_template": "json"}})
    assert selected_templates(tmp_path) == ("json", None)
    write(tmp_path, {"chat_template.jinja": " \n"})
    assert selected_templates(tmp_path) == ("json", None)
    write(tmp_path, {"chat_template.jinja": "jinja"})
    assert selected_templates(tmp_path) == ("jinja", None)


@pytest.mark.parametrize("value", [[], [1], {}, {"default": 1}, 7, None, " ", [{"name": 1}], [{"template": {}}]])
def test_malformed_template_entries_are_ignored(tmp_path, value):
    write(tmp_path, {"tokenizer_config.json": {"chat_template": value}, "chat_template.json": {"chat_template": value}})
    assert selected_templates(tmp_path) == (None, None)


def test_unreadable_template_files_are_ignored_and_invalid_utf8_is_replaced(tmp_path):
    (tmp_path / "chat_template.jinja").mkdir()
    write(tmp_path, {"chat_template.json": "{"})
    with pytest.raises(ModelFileError, match=r"chat_template\.json"):
        selected_templates(tmp_path)
    (tmp_path / "chat_template.jinja").rmdir()
    (tmp_path / "chat_template.jinja").write_text("x" * (MAX_SOURCE_LENGTH + 9))
    default, _ = selected_templates(tmp_path)
    assert default == "x" * (MAX_SOURCE_LENGTH + 1)
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "chat_template.jinja").write_bytes(b"a\xff")
    assert selected_templates(tmp_path) == ("a\ufffd", None)


def test_templates_in_gguf_files_are_found_by_name():
    def chosen(**metadata: object) -> tuple[str | None, str | None]:
        sources = TemplateSources.in_gguf({f"tokenizer.{name}": value for name, value in metadata.items()})
        return sources.default, sources.tool_use

    named_templates = {"chat_templates": ["rag", "tool_use"], "chat_template.rag": "r", "chat_template.tool_use": "t"}
    assert chosen() == (None, None)
    assert chosen(chat_template="d") == ("d", None)
    assert chosen(chat_template="d", **named_templates) == ("d", "t")
    assert chosen(**named_templates) == ("r", "t")
    assert chosen(chat_template=7, chat_templates="tool_use") == (None, None)
    assert chosen(chat_template=" ", chat_templates=[1, "absent"]) == (None, None)
