"""The tool `fetch`: return a web page as text. It is available only if the configuration allows it."""

from typing import Annotated, Any

from msgspec import Meta

from helexa.acp.history import ToolKind
from helexa.acp.tools.builtin import Arguments, BuiltIn
from helexa.acp.tools.excerpt import clipped, title
from helexa.acp.tools.tool import Act, Fetches, Progress, ToolContext, ToolError, ToolOutcome
from helexa.acp.tools.web import web_page

_MAX_BYTES = 48_000


class _Arguments(Arguments):
    url: Annotated[str, Meta(description="Its http(s) address.", min_length=1, max_length=2000)]


class Fetch(BuiltIn):
    """The tool `fetch`, which returns a web page as text."""

    name = "fetch"
    description = "Get a page of the public web as text."
    kind: ToolKind = "fetch"
    arguments = _Arguments

    def title(self, arguments: dict[str, Any], context: ToolContext) -> str:
        """Return a title with the URL of the page."""
        return f"Fetch {title(arguments['url'])}"

    def act(self, arguments: dict[str, Any], context: ToolContext) -> Act:
        """Return the effect of the call for the permission rules: it sends a request to a host (`Fetches`)."""
        return Fetches(web_page.parse_url(arguments["url"]).host or "")

    async def run(self, arguments: dict[str, Any], context: ToolContext, progress: Progress) -> ToolOutcome:
        """Fetch the page, and return its text for the model."""
        page = await web_page.fetch_page(arguments["url"])
        text = clipped(page.text, _MAX_BYTES) + ("\n[the page goes on]" if page.truncated else "")
        if page.status >= 400:
            raise ToolError(f"{page.url} answered with status {page.status}: {clipped(page.text, 1000)}")
        return ToolOutcome(f"{page.url}\n\n{text}")
