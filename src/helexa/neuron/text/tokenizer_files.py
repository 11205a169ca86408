"""Read the text settings and the tokenizer from a model's files."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import tokenizers

from helexa.core.errors import ModelFileError, UnsupportedModelError
from helexa.neuron.text.encoder import BackendEncoder, backend_errors
from helexa.neuron.text.gguf_tokenizer import MAX_TOKENS, GgufTokenizer
from helexa.neuron.text.settings_and_sampling_defaults import (
    TemplateSources,
    TextSettings,
    defaults_in_directory,
    defaults_in_gguf,
    pooling_in_directory,
    pooling_in_gguf,
    read_object,
    require_known_modules,
    special_tokens_in_directory,
    special_tokens_in_gguf,
)
from helexa.neuron.text.tokenizer import AddedText, Tokenizer, Vocabulary, spelling_of
from helexa.neuron.text.tokenizer_json import add_configured_tokens, read_tokenizer_json
from helexa.neuron.weights.gguf.files import GgufFile, gguf_models


def read_text_files(path: Path) -> tuple[TextSettings, BackendEncoder]:
    """Return the text settings of the model at `path`, and an encoder.

    Args:
        path: a .gguf file, a directory with a tokenizer.json, or a directory with one GGUF model.

    Raises:
        ModelFileError: `path` contains no model, or its files are malformed or not supported.
    """
    if path.is_dir() and (path / "tokenizer.json").exists():
        return _from_directory(path)
    return _from_gguf(_gguf_in(path) if path.is_dir() else path)


def _from_directory(path: Path) -> tuple[TextSettings, BackendEncoder]:
    require_known_modules(path)
    templates = TemplateSources.in_directory(path)
    vocabulary, encoder = directory_tokenizer(path)
    settings = TextSettings(
        vocabulary=vocabulary,
        templates=templates,
        special_tokens=special_tokens_in_directory(path),
        sampling_defaults=defaults_in_directory(path),
        pooling=pooling_in_directory(path),
    )
    return settings, encoder


def _from_gguf(path: Path) -> tuple[TextSettings, BackendEncoder]:
    file = GgufFile.open(path)
    templates = TemplateSources.in_gguf(file.metadata)
    try:
        vocabulary, encoder = gguf_tokenizer(file.metadata)
    except ModelFileError as error:
        raise ModelFileError(
            f"{path.name}: {error.problem}; the model is of architecture '{file.architecture}'",
            advice="download it again, or use another conversion",
        ) from error
    settings = TextSettings(
        vocabulary=vocabulary,
        templates=templates,
        special_tokens=special_tokens_in_gguf(file.metadata, Tokenizer(vocabulary, encoder)),
        sampling_defaults=defaults_in_gguf(file.metadata),
        pooling=pooling_in_gguf(file.metadata),
    )
    return settings, encoder


def _gguf_in(path: Path) -> Path:
    files = gguf_models(path)
    if len(files) != 1:
        contents = f"no tokenizer.json and {len(files) or 'no'} .gguf files"
        raise ModelFileError(f"{path} contains {contents}", advice="give the path of a model file")
    return files[0]


def backend_vocabulary(
    backend: tokenizers.Tokenizer,
    *,
    ids: dict[str, int] | None = None,
    repeated: Mapping[int, AddedText] = MappingProxyType({}),
    bos_id: int | None = None,
    eos_id: int | None = None,
    end_ids: Iterable[int] = (),
    prefix: Iterable[int | None] = (),
    suffix: Iterable[int | None] = (),
) -> Vocabulary:
    """Return the vocabulary of a tokenizer of the `tokenizers` library.

    Args:
        ids: the id of each token, by text; None to ask the library.
        repeated: by id, the tokens whose text an earlier token already has.
        prefix: see `Vocabulary`. None stands for a token that the vocabulary does not have.
        suffix: like `prefix`.

    Raises:
        ModelFileError: the tokenizer has too many tokens, or its decoder is not supported.
    """
    if (size := backend.get_vocab_size(with_added_tokens=True)) > MAX_TOKENS:
        raise UnsupportedModelError(f"the vocabulary has more than {MAX_TOKENS} tokens: {size}")
    added = backend.get_added_tokens_decoder()
    return Vocabulary(
        ids=backend.get_vocab(with_added_tokens=True) if ids is None else ids,  # asking the library takes longer
        added={token_id: AddedText(token.content, token.special) for token_id, token in added.items()} | dict(repeated),
        spelling=spelling_of(backend),
        bos_id=bos_id,
        eos_id=eos_id,
        end_ids=sorted(end_ids),
        prefix=[token for token in prefix if token is not None],
        suffix=[token for token in suffix if token is not None],
    )


def gguf_tokenizer(metadata: Mapping[str, Any]) -> tuple[Vocabulary, BackendEncoder]:
    """Return the tokenizer that the metadata of a GGUF file describes.

    Raises:
        ModelFileError: the type of tokenizer is not supported, or the value of a key is invalid.
    """
    file = GgufTokenizer(metadata)
    vocabulary = backend_vocabulary(
        file.backend,
        ids=file.ids,
        repeated=file.repeated,
        bos_id=file.bos_id,
        eos_id=file.eos_id,
        end_ids=file.end_ids,
        prefix=[file.bos_id] if file.add_bos else [],
        suffix=[file.eos_id] if file.add_eos else [],
    )
    return vocabulary, BackendEncoder(file.backend)


def directory_tokenizer(path: Path) -> tuple[Vocabulary, BackendEncoder]:
    """Return the tokenizer of a model directory from its `tokenizer.json`.

    Raises:
        ModelFileError: a file is missing or malformed, or the type of tokenizer is not supported.
    """
    backend = read_tokenizer_json(path / "tokenizer.json")
    config = read_object(path / "special_tokens_map.json") | read_object(path / "tokenizer_config.json")
    add_configured_tokens(backend, config, read_object(path / "added_tokens.json"))
    bos_id, eos_id = (_named_id(backend, config.get(key)) for key in ("bos_token", "eos_token"))
    prefix, suffix = _surrounding_ids(backend)
    if isinstance(add_bos := config.get("add_bos_token"), bool):
        prefix = [bos_id] if add_bos else []
    if isinstance(add_eos := config.get("add_eos_token"), bool):
        suffix = [eos_id] if add_eos else []
    ends = _configured_ends(path, backend.get_vocab_size(with_added_tokens=True))
    vocabulary = backend_vocabulary(backend, bos_id=bos_id, eos_id=eos_id, end_ids=ends, prefix=prefix, suffix=suffix)
    return vocabulary, BackendEncoder(backend)


def _surrounding_ids(backend: tokenizers.Tokenizer) -> tuple[Sequence[int | None], Sequence[int | None]]:
    """Return the ids that the post-processor puts before and after a text."""
    # These ids may differ from `bos_token` and `eos_token`: Qwen3-Embedding puts its padding token last.
    with backend_errors("tokenizer.json cannot be used", "download the model again"):
        if not backend.encode("", add_special_tokens=True).ids:
            return [], []
        encoding = backend.encode("a", add_special_tokens=True)
    added = encoding.special_tokens_mask
    first = next((index for index, special in enumerate(added) if not special), len(added))
    last = next((index for index in range(len(added), first, -1) if not added[index - 1]), first)
    return encoding.ids[:first], encoding.ids[last:]


def _named_id(backend: tokenizers.Tokenizer, token: Any) -> int | None:
    """Return the id of `token`, a text or an object with `content`; None if unknown."""
    if isinstance(token, dict):
        token = token.get("content")
    return backend.token_to_id(token) if isinstance(token, str) else None


def _configured_ends(path: Path, vocab_size: int) -> list[int]:
    """Return the end token ids in the first configuration file with valid ids, or []."""
    for name in ("generation_config.json", "config.json"):
        try:
            config = read_object(path / name)
        except ModelFileError:
            continue
        for section in (config, config.get("text_config")):
            ends = section.get("eos_token_id") if isinstance(section, dict) else None
            candidates = ends if isinstance(ends, list) else [ends]
            if valid := [end for end in candidates if type(end) is int and 0 <= end < vocab_size]:
                return valid
    return []
