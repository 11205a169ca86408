"""HTTP routes of the HTML pages."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from helexa.bench.api.query import Parameter, Parameters, read_query
from helexa.bench.pages import views
from helexa.bench.pages.render import Link, fingerprint, query_string, render
from helexa.bench.results import alerts
from helexa.bench.results.archive import Archive
from helexa.bench.results.dimensions import dimensions
from helexa.bench.results.series import HOT
from helexa.core.errors import ApiError

_TEXT = Parameter("")
_WHERE = {"target": _TEXT, "model": _TEXT}
_METRIC = Parameter("", choices=HOT)


@dataclass(frozen=True)
class Page:
    """Definition of one HTML page.

    Attributes:
        name: name of the page. The template is `<name>.html`.
        path: URL path.
        title: display name.
        view: function that returns the template variables from the database and the query parameters. It raises
            LookupError if a named item does not exist.
        parameters: definitions of the query parameters.
        in_menu: True if the menu of every page links to this page.
    """

    name: str
    path: str
    title: str
    view: Callable[[Archive, Mapping[str, Any]], dict[str, Any]]
    parameters: Parameters = field(default_factory=dict[str, Parameter])
    in_menu: bool = True


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
                "metric": _METRIC,
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
            "compare", "/compare", "Compare", views.compare, {"a": _TEXT, "b": _TEXT, "model": _TEXT, "metric": _METRIC}
        ),
        Page("capacity", "/capacity", "Capacity", views.loads, _WHERE),
        Page("context", "/context", "Context", views.context, _WHERE),
        Page("swap", "/swap", "Swap", views.swap, _WHERE),
        Page("quality", "/quality", "Quality", views.worth, _WHERE),
        Page(
            "alerts",
            "/alerts",
            "Alerts",
            views.alert_list,
            {**_WHERE, "state": Parameter("", choices=("suspected", "confirmed", "dismissed"))},
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
) -> str:
    """Return the HTML of a page.

    Args:
        archive: the result database.
        page: the page.
        query: values of the page's query parameters.
        link: returns the URL of a page.
        asset: returns the URL of a static file.
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
        **page.view(archive, query),
    )


def live_link(root: str) -> Link:
    """Return a function that returns the URLs of pages on a server. `root` is the path prefix of all URLs."""

    def link(name: str, **query: Any) -> str:
        if name == "api":
            return f"{root}/api/v1"
        path = PAGES[name].path.replace("{id:int}", str(query.pop("id", "")))
        return f"{root}{path}{query_string(query)}"

    return link


async def error_page(request: Request, error: Exception) -> Response:
    """Return an HTML error page for `error`. Errors other than `ApiError` get status 500."""
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
            return html(archive, page, query, live_link(root), partial(_asset, root))
        except LookupError as error:
            raise ApiError(404, "not_found", str(error.args[0])) from None

    return Response(await request.app.state.query_executor.ask(find), media_type="text/html")


def _asset(root: str, name: str) -> str:
    return f"{root}/static/{name}?{fingerprint(name)}"
