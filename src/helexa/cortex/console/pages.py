"""The console's page at `/`, and the scripts and styles that it uses."""

import base64
import hashlib
import re
from functools import cache

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from helexa.core.errors import ApiError
from helexa.core.version import __version__
from helexa.cortex.console.console import Console
from helexa.cortex.routes.access import public
from helexa.cortex.routes.health import get_health
from helexa.web.assets import FOREVER, SECURITY, Assets

ASSETS = Assets("helexa.cortex.console")
PATH = "/console/assets"

_IMPORT_MAP = re.compile(r'<script type="importmap">(.*?)</script>', re.DOTALL)


async def get_root(request: Request) -> Response:
    """Respond with the console's page to browsers, and with the state of the fleet to other clients."""
    console: Console = request.app.state.console
    if console.settings.enabled and "text/html" in request.headers.get("accept", ""):
        page, policy = _page()
        headers = {"content-security-policy": policy, "cache-control": "no-cache", "vary": "accept", **SECURITY}
        return Response(page, headers=headers, media_type="text/html")
    return await get_health(request)


async def get_asset(request: Request) -> Response:
    """Respond with a script, style sheet or licence of the console.

    If the page of an earlier version of helexa requests a file, browsers must not cache the new file under the old URL.
    """
    console: Console = request.app.state.console
    current = request.path_params["digest"] == ASSETS.digest
    name = request.path_params["name"]
    response = ASSETS.response(name, FOREVER if current else "no-store") if console.settings.enabled else None
    if response is None or name.endswith(".html"):
        raise ApiError(404, "unknown_path", f"unknown path {request.url.path[:200]}")
    response.headers.update(SECURITY)
    return response


page_routes = [Route(f"{PATH}/{{digest}}/{{name:path}}", public(get_asset))]


@cache
def _page() -> tuple[str, str]:
    """Return the HTML of the page, and its Content-Security-Policy.

    The page has one inline script, its import map, which the policy allows by its hash.
    """
    text = ASSETS.files["index.html"].decode()
    text = text.replace("{assets}", f"{PATH}/{ASSETS.digest}").replace("{version}", __version__)
    import_map = _IMPORT_MAP.search(text)
    assert import_map is not None
    digest = base64.b64encode(hashlib.sha256(import_map[1].encode()).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'self' 'sha256-{digest}'; style-src 'self'; img-src 'self' data: blob:; "
        "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types dompurify"
    )
    return text, policy
