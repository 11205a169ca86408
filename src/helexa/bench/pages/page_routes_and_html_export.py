"""The HTML pages: templates, routes, and the export as static files."""

import hashlib
import json
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from helexa.bench import alerts
from helexa.bench.api_queries import METRIC, STATE, Parameter, Parameters, read_query
from helexa.bench.metric_definitions import METRICS
from helexa.bench.pages import charts, formatting, views
from helexa.bench.results.archive import Archive
from helexa.bench.results.summary_and_dimensions import dimensions
from helexa.core.errors import ApiError, HelexaError
from helexa.core.version import __version__
from helexa.web import Assets

Link = Callable[..., str | None]  # function that returns the URL of a page, or None if it is unavailable
Asset = Callable[[str], str]

ASSETS = Assets("helexa.bench.pages")  # the static files of the pages


def query_string(query: Mapping[str, Any]) -> str:
    """Return `query` as the query part of a page's URL, starting with `?`.

    None, False, 0 and empty texts are omitted. Without other values, the result is empty.
    """
    arguments = {name: value for name, value in query.items() if value not in (None, "", False)}
    return f"?{urlencode(arguments, quote_via=quote)}" if arguments else ""


def render(template: str, link: Link, asset: Asset, **context: Any) -> str:
    """Return the HTML of a template.

    Args:
        template: file name of the template.
        link: returns the URL of a page.
        asset: returns the URL of a static file.
        context: further variables of the template.
    """
    return environment().get_template(template).render(link=link, asset=asset, version=__version__, **context)


@cache
def environment() -> Environment:
    """Return the Jinja environment with all filters and globals of the templates."""
    jinja = Environment(
        loader=PackageLoader("helexa.bench.pages"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    names = ("number", "seconds", "measured", "share", "change", "moment", "day", "memory")
    jinja.filters |= {name: getattr(formatting, name) for name in names} | {"data": _data}
    jinja.globals |= {"METRICS": METRICS, "drawings": charts}
    return jinja


@cache
def fingerprint(name: str) -> str:
    """Return a short hash of the content of one of the pages' static files.

    The hash is a part of the file's URL. When the file changes, its URL changes, and browsers do not use a cached old
    version.
    """
    return hashlib.sha256(ASSETS.files[name]).hexdigest()[:10]


def _data(value: object) -> Markup:
    """Return `value` as JSON that is safe to embed in an HTML element."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    return Markup(text.replace("<", "\\u003c").replace("&", "\\u0026"))


_TEXT = Parameter("")
_WHERE = {"target": _TEXT, "model": _TEXT}


@dataclass(frozen=True)
class Page:
    """Definition of one HTML page."""

    name: str  # name of the page. The template is `<name>.html`.
    path: str  # URL path
    title: str  # display name
    # Function that returns the template variables from the database and the query parameters. It raises LookupError if
    # a named item does not exist.
    view: Callable[[Archive, Mapping[str, Any]], dict[str, Any]]
    parameters: Parameters = field(default_factory=dict[str, Parameter])  # definitions of the query parameters
    in_menu: bool = True  # True if the menu of every page links to this page


PAGES = {
    page.name: page
    for page in (
        Page("overview", "/", "Overview", views.overview, {"target": _TEXT}),
        Page(
            "trends",
            "/trends",
            "Trends",
            views.trends,
            {
                **_WHERE,
                "scenario": _TEXT,
                "metric": METRIC,
                "x": Parameter("", default="build", choices=("build", "time")),
                "baseline": _TEXT,
            },
        ),
        Page(
            "runs",
            "/runs",
            "Runs",
            views.run_list,
            {
                **_WHERE,
                "scenario": _TEXT,
                "sha": _TEXT,
                "ok": Parameter("", "boolean"),
                "offset": Parameter("", "integer", 0, 0),
            },
        ),
        Page("run", "/runs/{id:int}", "Run", views.run, {"id": Parameter("", "integer", required=True)}, in_menu=False),
        Page(
            "compare", "/compare", "Compare", views.compare, {"a": _TEXT, "b": _TEXT, "model": _TEXT, "metric": METRIC}
        ),
        Page("capacity", "/capacity", "Capacity", views.loads, _WHERE),
        Page("context", "/context", "Context", views.context, _WHERE),
        Page("swap", "/swap", "Loading", views.swap, _WHERE),
        Page("quality", "/quality", "Quality", views.worth, _WHERE),
        Page(
            "alerts",
            "/alerts",
            "Alerts",
            views.alert_list,
            {**_WHERE, "state": STATE},
        ),
        Page("method", "/method", "Method", views.method),
    )
}


def routes() -> list[Route]:
    """Return the routes of all pages."""
    return [Route(page.path, partial(_show, page), methods=["GET"]) for page in PAGES.values()]


def html(
    archive: Archive,
    page: Page,
    query: Mapping[str, Any],
    link: Link,
    asset: Callable[[str], str],
    *,
    live: bool = True,
    console: str | None = None,
) -> str:
    """Return the HTML of a page.

    Args:
        archive: the result database.
        query: values of all query parameters of the page, including default values.
        link: returns the URL of a page.
        asset: returns the URL of a static file.
        console: URL of a gateway's console, or None.
        live: True if a server answers form submissions. If False (static export), the page has links instead of forms.

    Raises:
        LookupError: an item that the query names does not exist.
    """
    return render(
        f"{page.name}.html",
        link,
        asset,
        page=page,
        pages=[one for one in PAGES.values() if one.in_menu],
        regressions=sum(one.verdict == "regressed" for one in alerts.alerts(archive, state="confirmed")),
        offered=dimensions(archive),
        api=link("api"),
        live=live,
        console=console,
        **page.view(archive, query),
    )


def live_link(root: str) -> Link:
    """Return a function that returns the URLs of pages on a server.

    `root` is the path prefix of all URLs.
    """

    def link(name: str, **query: Any) -> str:
        if name == "api":
            return f"{root}/api/v1"
        path = PAGES[name].path.replace("{id:int}", str(query.pop("id", "")))
        return f"{root}{path}{query_string(query)}"

    return link


async def error_page(request: Request, error: Exception) -> Response:
    """Return an HTML error page for `error`.

    Errors other than `ApiError` get status 500.
    """
    known = isinstance(error, ApiError)
    status = error.status if known else 500
    root = request.app.state.root_path
    text = render(
        "refused.html",
        live_link(root),
        partial(_asset, root),
        page=None,
        pages=[one for one in PAGES.values() if one.in_menu],
        regressions=0,
        console=request.app.state.console_url,
        api=f"{root}/api/v1",
        status=status,
        message=str(error) if known else "Internal error; see the server's log.",
    )
    return Response(text, status, error.headers() if known else {}, "text/html")


async def _show(page: Page, request: Request) -> Response:
    arguments = {**request.query_params, **{name: str(value) for name, value in request.path_params.items()}}
    query = read_query(arguments, page.parameters)
    root = request.app.state.root_path

    def find(archive: Archive) -> str:
        try:
            console = request.app.state.console_url
            return html(archive, page, query, live_link(root), partial(_asset, root), console=console)
        except LookupError as error:
            raise ApiError(404, "not_found", str(error.args[0])) from None

    return Response(await request.app.state.query_executor.ask(find), media_type="text/html")


def _asset(root: str, name: str) -> str:
    return f"{root}/static/{name}?{fingerprint(name)}"


_LEFT_OUT = {"runs", "run", "api"}
MOST_PAGES = 5000


def export(archive: Archive, folder: Path) -> int:
    """Write the pages and their static files to `folder`; return the page count.

    Lists of samples, pages about single samples and comparisons of named builds are left out. The export has at most
    `MOST_PAGES` pages.

    Raises:
        HelexaError: the folder cannot be written.
    """
    site = _Site(archive)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in ASSETS.files.items():
            file = folder / "static" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)
        for name, text in site.pages():
            (folder / name).write_text(text, "utf-8")
    except OSError as error:
        reason = error.strerror or error
        raise HelexaError(f"cannot write to {folder}: {reason}; name a folder that you can write to") from None
    return site.written


class _Site:
    """The pages of an export: the overview, and all pages that it links to."""

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
        """Return the file name of a page, and add the page to the export.

        Return None for pages that are not exported.
        """
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
