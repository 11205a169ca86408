"""Read chat templates, sampling defaults, pooling and special tokens of a model."""

import io
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import orjson

from helexa.core.errors import UNREADABLE_FILE, ModelFileError
from helexa.neuron.text.tokenizer import Tokenizer, Vocabulary
from helexa.neuron.weights.gguf.header_and_metadata_reader import is_list_of
from helexa.neuron.weights.model_file import MAX_CONFIG_BYTES, MODULES_FILE, open_model_file, read_model_file

_MAX_BYTES = 16 << 20
_MAX_VALUES = 1 << 22

MAX_SOURCE_LENGTH = 1 << 20  # maximum number of characters in the source of a template

_DEFAULT_TEMPLATE = "default"
_TOOL_USE = "tool_use"

# For each file with a named template, as a path in the checkpoint's folder: the name of the template.
NAMED_TEMPLATES = {f"additional_chat_templates/{name}.jinja": name for name in (_DEFAULT_TEMPLATE, _TOOL_USE)}

SamplingDefaults = dict[str, float | int]
"""Values that a model's publisher recommends, for some keys of `_SAMPLING_KEYS`.

A value in a request overrides the publisher's value, which overrides the node's default
(`neuron.requests.sampling_and_context_limit`).
"""

# Key of each sampling parameter in a GGUF file's metadata. In generation_config.json, the parameter's name is the key.
# `max_new_tokens` is ignored: files usually contain a library's default and not a limit of the model.
_SAMPLING_KEYS = {
    "temperature": "general.sampling.temp",
    "top_p": "general.sampling.top_p",
    "top_k": "general.sampling.top_k",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}

Pooling = Literal["mean", "last", "cls", "max", "weightedmean"]
"""How an embedding model combines hidden states into one vector.

`mean` averages the hidden states of all positions, `last` uses the last position, and `cls` the first position. `max`
takes the largest value of each component. `weightedmean` averages with the weights 1, 2, 3 and so on by position.
"""

POOLING_FILE = "1_Pooling/config.json"  # file in which Sentence Transformers models define the pooling method

# The classes of Sentence Transformers that `requests.embedding` implements, and `Dropout`, which only training uses.
_MODULES = ("Transformer", "Pooling", "Normalize", "Dropout")

_DEFAULT_POOLING: Pooling = "mean"
_POOLING_MODES: dict[str, Pooling] = {
    "mean": "mean",
    "mean_sqrt_len_tokens": "mean",  # a multiple of the mean, and equal after the normalization
    "lasttoken": "last",
    "cls": "cls",
    "max": "max",
    "weightedmean": "weightedmean",
}
_POOLING_FLAG = re.compile(r"pooling_mode_(mean_sqrt_len_tokens|lasttoken|\w+?)(?:_tokens?)?")
# Pooling method by llama.cpp's number: -1 is unspecified, and 0 is no pooling, which the embeddings API does not have.
_GGUF_POOLING: dict[Any, Pooling] = {-1: "mean", 0: "mean", 1: "mean", 2: "cls", 3: "last"}
_RANK = 4  # llama.cpp's number for rerankers

# For each variable of a template: the key of the token in a GGUF file's metadata. As in `transformers`, a variable is
# defined only if the model's files define the token.
_TOKEN_KEYS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "sep_token": "seperator_token_id",
    "pad_token": "padding_token_id",
    "cls_token": "cls_token_id",
    "mask_token": "mask_token_id",
}


def read_object(path: Path, max_bytes: int = _MAX_BYTES) -> dict[str, Any]:
    """Return the JSON object of text settings at `path`, {} if there is no file.

    Raises:
        ModelFileError: the file cannot be read, is larger than `max_bytes`, has too many values, or does not contain a
            valid JSON object.
    """
    try:
        data = read_model_file(path, max_bytes)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ModelFileError(
            f"{path.name} cannot be read: {error.strerror or error}", advice=UNREADABLE_FILE
        ) from error
    return parse_object(data, path.name)


def parse_object(data: bytes, name: str) -> dict[str, Any]:
    """Return the JSON object of text settings in `data`, from the file `name`.

    Raises:
        ModelFileError: `data` has too many values, or is not a valid JSON object.
    """
    # The values are counted before parsing, because an empty list takes two bytes in the file and sixty in memory.
    if sum(map(data.count, (b",", b"[", b"{"))) > _MAX_VALUES:
        raise ModelFileError(
            f"{name} has more than {_MAX_VALUES} JSON values, the maximum", advice="download the model again"
        )
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise ModelFileError(f"{name} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelFileError(f"{name} does not contain a JSON object, but a value of type {type(value).__name__}")
    return value


@dataclass(frozen=True)
class TemplateSources:
    """The source texts of a model's chat templates."""

    default: str | None = None  # the model's chat template, or None
    tool_use: str | None = None  # the template for conversations with tools. None to use the default template.

    @classmethod
    def by_name(cls, templates: Mapping[str, Any]) -> "TemplateSources":
        """Select the templates to use from `templates`, which maps names to texts.

        The default template is the template with the name `default`, or else the first template. Empty texts and values
        that are no text are ignored.
        """
        texts = {name: text for name, text in templates.items() if isinstance(text, str) and text.strip()}
        default = texts.get(_DEFAULT_TEMPLATE, next(iter(texts.values()), None))
        return cls(default, texts.get(_TOOL_USE))

    @classmethod
    def in_directory(cls, path: Path) -> "TemplateSources":
        """Return the chat templates in the model directory `path`.

        The first location with a template is used, in the order of `transformers`:

        * `chat_template.jinja`, together with `additional_chat_templates/{default,tool_use}.jinja`
        * `chat_template.json`
        * `tokenizer_config.json`, in which `chat_template` is a text, a list of names and texts, or an object that maps
          names to texts

        Raises:
            ModelFileError: one of the JSON files cannot be read, or contains no JSON object.
        """
        files = {_DEFAULT_TEMPLATE: _template_text(path / "chat_template.jinja")}
        for file, name in NAMED_TEMPLATES.items():
            files[name] = _template_text(path / file) or files.get(name)
        sources = cls.by_name(files)
        for name in ("chat_template.json", "tokenizer_config.json"):
            if sources.default is None:
                sources = cls.by_name(_templates_by_name(read_object(path / name).get("chat_template")))
        return sources

    @classmethod
    def in_gguf(cls, metadata: Mapping[str, Any]) -> "TemplateSources":
        """Return the chat templates in GGUF metadata, `tokenizer.chat_template[.NAME]`."""
        key = "tokenizer.chat_template"
        names = metadata.get("tokenizer.chat_templates")
        template_names = names if is_list_of(names, str) else []
        return cls.by_name(
            {_DEFAULT_TEMPLATE: metadata.get(key)} | {name: metadata.get(f"{key}.{name}") for name in template_names}
        )


def _template_text(path: Path) -> str | None:
    """Return the text of the file at `path`, or None if it cannot be read."""
    try:
        with io.TextIOWrapper(open_model_file(path), "utf-8", "replace") as file:
            return file.read(MAX_SOURCE_LENGTH + 1)  # enough for the renderer to reject the text as too long
    except (OSError, ModelFileError):
        return None


def _templates_by_name(value: Any) -> dict[str, Any]:
    if isinstance(value, dict):
        return value
    if isinstance(value, list):
        entries = [entry for entry in value if isinstance(entry, dict)]
        return {str(entry.get("name")): entry.get("template") for entry in entries}
    return {_DEFAULT_TEMPLATE: value}


class TextSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a model's files define about text processing.

    `special_tokens` has the texts of the special tokens that chat templates use as variables.
    """

    vocabulary: Vocabulary
    templates: TemplateSources
    special_tokens: dict[str, str]
    sampling_defaults: SamplingDefaults
    pooling: Pooling


def defaults_in_directory(path: Path) -> SamplingDefaults:
    """Return sampling defaults from a directory's `generation_config.json`, if valid.

    Without sampling (`do_sample` is false), the temperature is 0.
    """
    try:
        config = read_object(path / "generation_config.json")
    except ModelFileError:
        return {}
    # As in `transformers`, do_sample=false means greedy decoding, even if the file has a temperature. If `do_sample` is
    # missing, `transformers` decodes greedily, too. Here, it means nothing: such a file may only list end tokens.
    greedy: SamplingDefaults = {"temperature": 0.0} if config.get("do_sample") is False else {}
    return _numbers({name: config.get(name) for name in _SAMPLING_KEYS}) | greedy


def defaults_in_gguf(metadata: Mapping[str, Any]) -> SamplingDefaults:
    """Return the sampling defaults in a GGUF file's metadata."""
    return _numbers({name: metadata.get(key) for name, key in _SAMPLING_KEYS.items()})


def _numbers(values: Mapping[str, Any]) -> SamplingDefaults:
    return {name: value for name, value in values.items() if type(value) in (int, float) and math.isfinite(value)}


def require_known_modules(path: Path) -> None:
    """Check that a model's embeddings need no steps besides pooling and normalization.

    Raises:
        ModelFileError: a readable `modules.json` names a module that is not implemented, such as `Dense`.
    """
    try:
        modules = orjson.loads(read_model_file(path / MODULES_FILE, MAX_CONFIG_BYTES))
    except (OSError, ValueError, ModelFileError):
        return
    stated = [module.get("type") for module in modules if isinstance(module, dict)] if isinstance(modules, list) else []
    for name in (kind.rpartition(".")[2] for kind in stated if isinstance(kind, str)):
        if name not in _MODULES:
            raise ModelFileError(
                f"{MODULES_FILE}: the module {name[:40]!r} is not supported, only {', '.join(_MODULES)}: the "
                "embeddings would be wrong",
                advice="use another embedding model",
            )


def pooling_in_directory(path: Path) -> Pooling:
    """Return the pooling method of the model in a directory, `mean` by default.

    Raises:
        ModelFileError: the model has an unknown method, or concatenates the vectors of several methods.
    """
    try:
        config = read_object(path / POOLING_FILE)
    except ModelFileError:
        return _DEFAULT_POOLING
    flags = [match[1] for name, value in config.items() if value is True and (match := _POOLING_FLAG.fullmatch(name))]
    mode = config.get("pooling_mode")  # a name or a list of names, in newer files
    modes = flags or (mode if isinstance(mode, list) else [mode] if mode is not None else [])
    if not modes:
        return _DEFAULT_POOLING
    pooling = _POOLING_MODES.get(modes[0]) if len(modes) == 1 and isinstance(modes[0], str) else None
    if pooling is None:
        raise ModelFileError(
            f"{POOLING_FILE}: the pooling {' with '.join(map(str, modes))[:80]!r} is not supported, only one of "
            f"{', '.join(_POOLING_MODES)}: the embeddings would be wrong",
            advice="use another embedding model",
        )
    return pooling


def pooling_in_gguf(metadata: Mapping[str, Any]) -> Pooling:
    """Return the pooling method of the model in a GGUF file, `mean` by default.

    Raises:
        ModelFileError: the model is a reranker, or has an unknown method.
    """
    key = f"{metadata.get('general.architecture')}.pooling_type"
    pooling_type = metadata.get(key)
    if type(pooling_type) is not int:
        return _DEFAULT_POOLING
    if pooling_type not in _GGUF_POOLING:
        reason = "the model is a reranker" if pooling_type == _RANK else "the method is unknown"
        raise ModelFileError(f"{key} {pooling_type} is not supported: {reason}", advice="use an embedding model")
    return _GGUF_POOLING[pooling_type]


def special_tokens_in_directory(path: Path) -> dict[str, str]:
    """Return the special tokens of a model directory, by chat template variable.

    Raises:
        ModelFileError: one of the files contains no JSON object.
    """
    config = read_object(path / "special_tokens_map.json") | read_object(path / "tokenizer_config.json")
    extra = config.get("extra_special_tokens")
    tokens = {key: value for key, value in config.items() if key.endswith("_token")}
    texts = {key: _token_text(value) for key, value in (tokens | (extra if isinstance(extra, dict) else {})).items()}
    return {key: text for key, text in texts.items() if text is not None}


def special_tokens_in_gguf(metadata: Mapping[str, Any], tokenizer: Tokenizer) -> dict[str, str]:
    """Return the special tokens of a GGUF file, by chat template variable."""
    ids = {name: metadata.get(f"tokenizer.ggml.{key}") for name, key in _TOKEN_KEYS.items()}
    texts = {name: tokenizer.token_text(value) if type(value) is int else None for name, value in ids.items()}
    return {name: text for name, text in texts.items() if text is not None}


def _token_text(token: Any) -> str | None:
    """Return the text of a token, which is a string or an object with `content`."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None
