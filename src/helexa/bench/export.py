"""Writes the web pages as static files, except the list of samples and the pages of single samples."""

import hashlib
import shutil
from collections import deque
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from helexa.bench.pages.render import query_string
from helexa.bench.pages.site import PAGES, html
from helexa.bench.results.archive import Archive
from helexa.core.errors import HelexaError

_LEFT_OUT = {"runs", "run", "api"}
MOST_PAGES = 5000


def export(archive: Archive, folder: Path) -> int:
    """Write all pages and the files that they use to `folder`. Return the number of pages.

    Raises:
        HelexaError: the folder cannot be written.
    """
    site = _Site(archive)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        static = resources.files("helexa.bench.pages").joinpath("static")
        with resources.as_file(static) as files:
            shutil.copytree(files, folder / "static", dirs_exist_ok=True)
        for name, text in site.pages():
            (folder / name).write_text(text, "utf-8")
    except OSError as error:
        raise HelexaError(f"cannot write to {folder}: {error.strerror or error}") from None
    return site.written


class _Site:
    """The pages of an export: the overview, and all pages that can be reached by links from the overview."""

    def __init__(self, archive: Archive) -> None:
        self._archive = archive
        self._queue: deque[tuple[str, dict[str, Any]]] = deque([("overview", {})])
        self._known: dict[str, str] = {}
        self.written = 0

    def pages(self) -> Any:
        """Yield the file name and the HTML of each page."""
        self.link("overview")
        while self._queue:
            name, query = self._queue.popleft()
            file = self._file(name, query)
            if self._known.get(file) == "written":
                continue
            self._known[file] = "written"
            page = PAGES[name]
            read = {key: parameter.default for key, parameter in page.parameters.items()} | query
            try:
                text = html(self._archive, page, read, self.link, lambda asset: f"static/{asset}", live=False)
            except LookupError:
                continue
            self.written += 1
            yield file, text

    def link(self, name: str, **query: Any) -> str | None:
        """Return the file name of a page and add it to the export. Return None for pages that are not exported."""
        given = {key: value for key, value in query.items() if value not in (None, "")}
        if name in _LEFT_OUT or (name == "compare" and given):  # comparisons of all pairs of builds would be too many
            return None
        file = self._file(name, given)
        if file not in self._known:
            if len(self._known) >= MOST_PAGES:
                return None
            self._known[file] = "linked"
            self._queue.append((name, given))
        return file

    @staticmethod
    def _file(name: str, query: Mapping[str, Any]) -> str:
        if not query:
            return "index.html" if name == "overview" else f"{name}.html"
        digest = hashlib.sha256(query_string(dict(sorted(query.items()))).encode()).hexdigest()[:12]
        return f"{name}-{digest}.html"
