"""Serves the static files of a package: scripts, style sheets and licenses."""

import hashlib
from functools import cached_property
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import PurePosixPath

from starlette.responses import Response

# Response headers of all pages and files.
SECURITY = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
}

FOREVER = "public, max-age=31536000, immutable"  # `Cache-Control` of a file whose URL contains a hash of its content

_MEDIA_TYPES = {
    ".js": "text/javascript",
    ".mjs": "text/javascript",
    ".css": "text/css",
    ".html": "text/html",
    ".svg": "image/svg+xml",
    ".woff2": "font/woff2",
}


class Assets:
    """The files in the folder `static` of `helexa.web` and of other packages.

    If several packages have a file with the same path, the file of the last of them is used.
    """

    def __init__(self, *packages: str) -> None:
        self._packages = ("helexa.web", *packages)

    @cached_property
    def files(self) -> dict[str, bytes]:
        """The content of all files, by path relative to the folder `static`."""
        files: dict[str, bytes] = {}
        for package in self._packages:
            _read(resources.files(package) / "static", "", files)
        return files

    @cached_property
    def digest(self) -> str:
        """A short hash of all files."""
        # The hash is a part of the files' URLs, so that browsers cache the files until one of them changes.
        digest = hashlib.sha256()
        for name, content in sorted(self.files.items()):
            digest.update(b"%b %d " % (name.encode(), len(content)) + content)
        return digest.hexdigest()[:12]

    def response(self, name: str, cache_control: str) -> Response | None:
        """Return the response for the file `name`, or None if there is no such file."""
        content = self.files.get(name)
        if content is None:
            return None
        media_type = _MEDIA_TYPES.get(PurePosixPath(name).suffix, "text/plain")
        return Response(content, headers={"cache-control": cache_control}, media_type=media_type)


def _read(folder: Traversable, prefix: str, files: dict[str, bytes]) -> None:
    for entry in folder.iterdir():
        if entry.is_dir():
            _read(entry, f"{prefix}{entry.name}/", files)
        else:
            files[prefix + entry.name] = entry.read_bytes()
