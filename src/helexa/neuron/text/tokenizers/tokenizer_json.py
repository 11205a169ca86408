"""Read a model's `tokenizer.json`."""

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from helexa.core.errors import ModelFileError
from helexa.neuron.text.json_file import read_object
from helexa.neuron.text.tokenizers.backend_errors import backend_errors
from helexa.neuron.text.tokenizers.gguf_vocabulary import MAX_ADDED_LENGTH

MAX_BYTES = 64 << 20


def read_tokenizer_json(path: Path) -> Tokenizer:
    """Return the tokenizer in the `tokenizer.json` file at `path`, with truncation and padding disabled.

    Raises:
        ModelFileError: the file cannot be read, exceeds a size limit, or is rejected by the `tokenizers` library.
    """
    if _added_length(read_object(path, MAX_BYTES)) > MAX_ADDED_LENGTH:
        raise ModelFileError(f"{path.name} has added tokens of more than {MAX_ADDED_LENGTH} characters")
    with backend_errors(f"{path.name} cannot be read"):
        backend = Tokenizer.from_file(str(path))
    backend.no_truncation()
    backend.no_padding()
    return backend


def _added_length(file: dict[str, Any]) -> int:
    """Return the total number of characters in the added tokens of a parsed `tokenizer.json`.

    Malformed tokens are not counted.
    """
    added = file.get("added_tokens")
    contents = (token.get("content") for token in added if isinstance(token, dict)) if isinstance(added, list) else ()
    return sum(len(content) for content in contents if isinstance(content, str))
