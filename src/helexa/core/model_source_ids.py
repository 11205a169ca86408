"""Names of models: source ids `scheme:name`, and the forms that users write.

A source id names the files from which a model is loaded:

| source id                                  | meaning                               |
|--------------------------------------------|---------------------------------------|
| `org/name`, `huggingface:org/name`         | a Hugging Face repository             |
| `org/name:Q4_K_M`                          | one quantization in a repository      |
| `pypi:package`, `pypi:package==version`    | a model file inside a Python wheel    |
| `file:/path`, `/path`, `./path`, `~/path`  | a local path                          |

Users also write short names such as `llama3.2:1b` (see `known_models`), and relative paths without `./`; see
`typed_source`.
"""

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from helexa.core.errors import SourceError
from helexa.core.known_models import full_name

DEFAULT_SCHEME = "huggingface"

_SEGMENT = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_SCHEME = re.compile(r"[a-z][a-z0-9_-]*")
_REPOSITORY = re.compile(rf"(?P<name>{_SEGMENT}/{_SEGMENT})(:(?P<tag>{_SEGMENT}))?")
_PACKAGE = re.compile(rf"{_SEGMENT}(==[A-Za-z0-9.!+_-]+)?")
_PATH_PREFIXES = ("/", "./", "../", "~")
_NEAR = 0.6  # minimum similarity (0 to 1) of a suggested name
_ABOUT_EQUAL = 0.05  # maximum difference between the similarity of a suggested name and that of the best name
_MOST_NEAR = 3  # maximum number of suggested names


@dataclass(frozen=True)
class ModelSource:
    """A parsed model source id, which names the files of a model."""

    scheme: str  # kind of the source: `huggingface`, `pypi`, `file` or another hub
    name: str  # name of the repository or package, or a path
    tag: str | None = None  # name of the quantization after the second colon of the id, or None

    def __str__(self) -> str:
        return f"{self.scheme}:{self.name}" + (f":{self.tag}" if self.tag else "")

    def quant(self, requested: str | None) -> str | None:
        """Return the quantization to load: `requested`, or else the `tag` of the id.

        Raises:
            SourceError: `requested` and `tag` are different quantizations. Its `kind` is `invalid_source`.
        """
        if requested and self.tag and _normalized(requested) != _normalized(self.tag):
            raise _invalid(
                str(self),
                f"the quantization in this name differs from quant, which is '{requested[:100]}'; give only one",
            )
        return requested or self.tag

    @classmethod
    def parse(cls, text: str, default_scheme: str = DEFAULT_SCHEME) -> "ModelSource":
        """Parse a source id such as `org/name` or `pypi:package`.

        An id without a scheme gets `default_scheme`.

        Raises:
            SourceError: the text is not a valid source id. Its `kind` is `invalid_source`, and the message names the
                reason.
        """
        text = text.strip()
        if text.startswith(_PATH_PREFIXES):
            return cls("file", text)
        scheme, colon, name = text.partition(":")
        if not colon or "/" in scheme:
            scheme, name = default_scheme, text
        if not name:
            raise _invalid(text, "the name is empty; write org/name")
        if not _SCHEME.fullmatch(scheme):
            raise _invalid(
                text, f"'{scheme}:' is not a known kind of source; write org/name, or a name of `helexa models`"
            )
        if scheme == "file":
            return cls(scheme, name)
        if scheme == "pypi":
            if not _PACKAGE.fullmatch(name):
                raise _invalid(text, "the name of the package is invalid; write pypi:package or pypi:package==version")
            return cls(scheme, name)
        match = _REPOSITORY.fullmatch(name)
        if ".." in name or match is None:
            raise _invalid(text, "the name of the repository is invalid; write org/name or org/name:QUANTIZATION")
        return cls(scheme, match["name"], match["tag"])


def typed_source(text: str) -> str:
    """Return the source id for a model name that a user typed.

    * The relative path of an existing model gets `./` in front.
    * A short name such as `llama3.2:1b` becomes the name of the model; see `known_models`.
    * `hf.co/org/name` becomes `org/name`.
    * Other names stay as they are.
    """
    if text.startswith(_PATH_PREFIXES):
        return text
    return f"./{text}" if _is_relative_path(text) else full_name(text)


def _is_relative_path(text: str) -> bool:
    """Return whether `text` is the path of a file or of a folder with a model."""
    if ":" in text or not text:
        return False
    try:
        # A folder without a model does not count, because its path may equal the name of a repository by accident.
        path = Path(text)
        return path.is_file() or (path / "config.json").is_file() or any(path.glob("*.gguf"))
    except (OSError, ValueError):
        return False


def is_path(text: str) -> bool:
    """Return whether a source id is a path."""
    return text.startswith((*_PATH_PREFIXES, "file:"))


def bare_id(text: str) -> str:
    """Return the model id that requests use for the source id `text`.

    Examples: `huggingface:org/name` gives `org/name`, and `/models/tiny.gguf` gives `tiny`.
    """
    if is_path(text):
        name = Path(text.removeprefix("file:")).name
        return name[:-5] if name.lower().endswith(".gguf") else name
    scheme, colon, name = text.partition(":")
    return name if colon and "/" not in scheme else text


def suggestion(name: str, names: Iterable[str]) -> str | None:
    """Return "did you mean ...?" with at most three similar model `names`, or None.

    Two names are compared with and without their organizations, quantizations and punctuation.
    """
    ratios = {other: _similarity(name, other) for other in names if other != name}
    near = sorted((other for other in ratios if ratios[other] >= _NEAR), key=lambda other: -ratios[other])
    best = ratios[near[0]] if near else 0.0
    near = [f"'{other}'" for other in near if ratios[other] >= best - _ABOUT_EQUAL][:_MOST_NEAR]
    *first, last = near or [""]
    return f"did you mean {', '.join(first)}{' or ' if first else ''}{last}?" if last else None


def _similarity(first: str, second: str) -> float:
    pairs = ((first.lower(), second.lower()), (_key(first), _key(second)))
    return max(difflib.SequenceMatcher(None, *pair).ratio() for pair in pairs)


def _key(name: str) -> str:
    """Return `name` without organization, quantization and punctuation."""
    name = name.lower().rpartition("/")[2]
    if "-gguf" in name:
        name = name.partition("-gguf")[0]
    for word in ("-instruct", "-it", "meta-"):
        name = name.replace(word, "")
    return "".join(filter(str.isalnum, name))


def _normalized(quant: str) -> str:
    return quant.lower().replace("_", "")


def _invalid(text: str, reason: str) -> SourceError:
    return SourceError(f"'{text[:200]}' is not a model source: {reason}", kind="invalid_source", model_id=text[:200])
