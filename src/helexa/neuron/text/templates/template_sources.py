"""Find the chat templates in a model's files."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from helexa.neuron.text.json_file import read_object
from helexa.neuron.text.templates.template_renderer import MAX_SOURCE_LENGTH

_DEFAULT = "default"
_TOOL_USE = "tool_use"


@dataclass(frozen=True)
class TemplateSources:
    """The source texts of a model's chat templates.

    Attributes:
        default: the model's chat template, or None.
        tool_use: the template for conversations with tools. None to use the default template.
    """

    default: str | None = None
    tool_use: str | None = None

    @classmethod
    def by_name(cls, templates: Mapping[str, Any]) -> "TemplateSources":
        """Select the templates to use from `templates`, which maps template names to texts.

        The default template is the template with the name `default`, or else the first template. Values that are not
        text, and empty texts, are ignored.
        """
        texts = {name: text for name, text in templates.items() if isinstance(text, str) and text.strip()}
        default = texts.get(_DEFAULT, next(iter(texts.values()), None))
        return cls(default, texts.get(_TOOL_USE))

    @classmethod
    def in_directory(cls, path: Path) -> "TemplateSources":
        """Return the chat templates in the model directory `path`.

        The method tries the following locations in this order and uses the first one with a template, as `transformers`
        does:

        * `chat_template.jinja`, together with `additional_chat_templates/{default,tool_use}.jinja`
        * `chat_template.json`
        * `tokenizer_config.json`, in which `chat_template` is a text, a list of names and texts, or an object that maps
          names to texts

        Raises:
            ModelFileError: one of the JSON files contains no JSON object.
        """
        files = {_DEFAULT: _text(path / "chat_template.jinja")}
        for name in (_DEFAULT, _TOOL_USE):
            files[name] = _text(path / "additional_chat_templates" / f"{name}.jinja") or files.get(name)
        sources = cls.by_name(files)
        for name in ("chat_template.json", "tokenizer_config.json"):
            if sources.default is None:
                sources = cls.by_name(_templates_by_name(read_object(path / name).get("chat_template")))
        return sources

    @classmethod
    def in_gguf(cls, metadata: Mapping[str, Any]) -> "TemplateSources":
        """Return the chat templates in GGUF metadata: `tokenizer.chat_template` and `tokenizer.chat_template.NAME`."""
        key = "tokenizer.chat_template"
        names = metadata.get("tokenizer.chat_templates")
        template_names = [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
        return cls.by_name(
            {_DEFAULT: metadata.get(key)} | {name: metadata.get(f"{key}.{name}") for name in template_names}
        )


def _text(path: Path) -> str | None:
    """Return the text of the file at `path`, or None if it cannot be read.

    Of a text longer than `MAX_SOURCE_LENGTH`, return only `MAX_SOURCE_LENGTH + 1` characters, which the renderer
    rejects as too long.
    """
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return file.read(MAX_SOURCE_LENGTH + 1)
    except OSError:
        return None


def _templates_by_name(value: Any) -> dict[str, Any]:
    if isinstance(value, dict):
        return value
    if isinstance(value, list):
        entries = [entry for entry in value if isinstance(entry, dict)]
        return {str(entry.get("name")): entry.get("template") for entry in entries}
    return {_DEFAULT: value}
