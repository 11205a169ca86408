"""The console: its sessions, the routes that sign users in and out, and its page."""

import base64
import hashlib
import hmac
import re
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from helexa.core.errors import ApiError
from helexa.core.version import __version__
from helexa.cortex.access.auth import Credential
from helexa.cortex.access.keys import Key, Principal, digest_of
from helexa.cortex.access.proxies_exposure_and_cors import is_from_this_machine
from helexa.cortex.access.sign_in_links import SignInLinks
from helexa.cortex.api.admin_requests import SignIn
from helexa.cortex.config import ConsoleSection
from helexa.cortex.console.events import EventHub
from helexa.cortex.gateway import Gateway
from helexa.cortex.routes.access_and_errors import public
from helexa.cortex.routes.health_usage_costs_and_activity import get_health
from helexa.http.headers import Headers, host_and_origin, is_same_origin
from helexa.http.responses import JsonResponse
from helexa.web import FOREVER, SECURITY, Assets

COOKIE = "helexa_session"
CSRF_HEADER = "x-helexa-csrf"
MAX_SESSIONS = 1000
MAX_SESSIONS_PER_CREDENTIAL = 50

_TOKEN_BYTES = 32  # random bytes of session ids and CSRF tokens, which must not be guessable
_MAX_COOKIE_BYTES = 4096
_CSRF_HEADER = CSRF_HEADER.encode()
_COOKIE_PREFIX = COOKIE.encode() + b"="

_SECS_PER_HOUR = 3600
_NO_STORE = {"cache-control": "no-store"}
ASSETS = Assets("helexa.cortex.console")
PATH = "/console/assets"
_IMPORT_MAP = re.compile(r'<script type="importmap">(.*?)</script>', re.DOTALL)


@dataclass(frozen=True)
class Session:
    """One session of the console: a sign-in of a user in one browser."""

    credential: Credential  # the digest of the API key, or the principal of a user of an identity provider
    csrf: str  # token that a request must send in the header `x-helexa-csrf` in addition to the cookie
    expires_at: float  # when the session ends (Unix seconds)


class Sessions:
    """The sessions of one gateway, in memory. A restart of the gateway ends them.

    If there are `MAX_SESSIONS` sessions, a new session replaces the oldest session. If the credential of the new
    session has `MAX_SESSIONS_PER_CREDENTIAL` sessions already, the new session replaces the oldest of these instead.
    Session ids are stored as hashes.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._sessions: dict[bytes, Session] = {}  # sessions by the hash of their id, oldest first

    def __len__(self) -> int:
        """Return the number of sessions, including expired sessions."""
        return len(self._sessions)

    def start(self, credential: Credential, lifetime_secs: float) -> tuple[str, Session]:
        """Start a session; return the value of its cookie, and the session."""
        now = self._clock()
        self._sessions = {id: session for id, session in self._sessions.items() if session.expires_at > now}
        same = [id for id, session in self._sessions.items() if session.credential == credential]
        if len(same) >= MAX_SESSIONS_PER_CREDENTIAL:
            del self._sessions[same[0]]
        elif len(self._sessions) >= MAX_SESSIONS:
            del self._sessions[next(iter(self._sessions))]
        token = secrets.token_urlsafe(_TOKEN_BYTES)
        session = Session(credential, secrets.token_urlsafe(_TOKEN_BYTES), now + lifetime_secs)
        self._sessions[_digest(token.encode())] = session
        return token, session

    def end(self, headers: Headers) -> None:
        """End the session that the cookie of a request names, without a CSRF check."""
        if (token := _cookie(headers)) is not None:
            self._sessions.pop(_digest(token), None)

    def of_cookie(self, headers: Headers) -> Session | None:
        """Return the session of a request's cookie, without a CSRF check.

        Return None if the request has no cookie of a valid session, or comes from a page of another origin.
        """
        token = _cookie(headers)
        session = None if token is None or _is_foreign(headers) else self._sessions.get(_digest(token))
        return None if session is None or session.expires_at <= self._clock() else session

    def credential(self, headers: Headers) -> Credential | None:
        """Return the credential of the session that a request belongs to.

        Return None if the request has no cookie of a valid session, a missing or wrong CSRF token, or comes from a page
        of another origin.
        """
        csrf = next((value for name, value in headers if name == _CSRF_HEADER), None)
        if csrf is None:
            return None
        session = self.of_cookie(headers)
        matches = session is not None and hmac.compare_digest(csrf, session.csrf.encode())
        return session.credential if session is not None and matches else None


def _is_foreign(headers: Headers) -> bool:
    """Return whether a page of another origin sent the console's request."""
    host, origin = host_and_origin(headers)
    site = next((value for name, value in headers if name == b"sec-fetch-site"), b"")
    return (origin != b"" and not is_same_origin(origin, host)) or site not in (b"", b"same-origin", b"none")


def _cookie(headers: Headers) -> bytes | None:
    for name, value in headers:
        if name == b"cookie" and len(value) <= _MAX_COOKIE_BYTES:
            for pair in value.split(b";"):
                if (pair := pair.strip()).startswith(_COOKIE_PREFIX):
                    return pair[len(_COOKIE_PREFIX) :]
    return None


def _digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()


class Console:
    """The console of one gateway: its sessions, and events of finished requests."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway
        self.sessions = Sessions()
        self.links = SignInLinks()  # the sign-in links that this gateway has accepted
        # changes of nodes and finished requests
        self.events = EventHub(gateway.fleet, gateway.lifecycle, gateway.poller, lambda: gateway.catalog)
        gateway.authenticator.find_session = self._credential
        gateway.observers.append(self.events.publish)

    @property
    def settings(self) -> ConsoleSection:
        """The current configuration of the console."""
        return self.gateway.config.console

    def check_enabled(self) -> None:
        """Raise ApiError 404 `console_disabled` if the console is disabled."""
        if not self.settings.enabled:
            raise ApiError(
                404,
                "console_disabled",
                "the console is disabled; to sign in, set console.enabled = true in cortex.toml",
            )

    def session(self, headers: Headers) -> Session | None:
        """Return the session of a request's cookie, without a CSRF check.

        Return None without a valid session, and if the console is disabled.
        """
        return self.sessions.of_cookie(headers) if self.settings.enabled else None

    def start_session(self, credential: Credential) -> tuple[str, Session]:
        """Start a session of the configured length; return cookie value and session."""
        return self.sessions.start(credential, self.settings.session_hours * _SECS_PER_HOUR)

    @property
    def link_keys(self) -> list[Key]:
        """The keys that sign links for signing in: admins' keys of cortex.toml, or none.

        Without a console, the list is empty.
        """
        keys = self.gateway.authenticator.static if self.settings.enabled else ()
        return [key for key in keys if key.principal.role == "admin"]

    def _credential(self, headers: Headers) -> Credential | None:
        return self.sessions.credential(headers) if self.settings.enabled else None


async def get_session(request: Request) -> Response:
    """`GET /api/session`: respond with the account, API key id and CSRF token."""
    # A request without a valid key gets the reason, but no error status, so that a page can offer to sign in.
    console: Console = request.app.state.console
    headers = request.scope["headers"]
    session, principal, reason = console.session(headers), None, None
    authenticator = console.gateway.authenticator
    try:
        principal = authenticator.admit(headers) if session is None else authenticator.principal_of(session.credential)
    except ApiError as error:
        reason = str(error)
    return _response(request, principal, session, reason)


async def sign_in(request: Request) -> Response:
    """Start a console session for an API key or a sign-in link; set its cookie."""
    console: Console = request.app.state.console
    console.check_enabled()
    headers = request.scope["headers"]
    if _is_foreign(headers):
        raise ApiError(
            403,
            "origin_not_allowed",
            "a page of another origin may not sign in; open the console at the gateway's own address",
        )
    body = await SignIn.read(request)
    digest = _redeemed(request, body.link) if body.key is None else digest_of(body.key.strip().encode())
    principal = console.gateway.authenticator.principal_of(digest)
    console.sessions.end(headers)
    token, session = console.start_session(digest)
    response = _response(request, principal, session)
    set_cookie(response, token, session, secure=request.headers.get("origin", "").startswith("https://"))
    return response


async def sign_out(request: Request) -> Response:
    """End the console session of the request, and delete its cookie."""
    console: Console = request.app.state.console
    headers = request.scope["headers"]
    if console.sessions.credential(headers) is None:
        raise ApiError(401, "no_session", "the request has no valid session cookie and CSRF token; sign in again")
    console.sessions.end(headers)
    response = _response(request, None, None)
    response.delete_cookie(COOKIE, path="/", httponly=True, samesite="strict")
    return response


def set_cookie(response: Response, token: str, session: Session, *, secure: bool) -> None:
    """Add the cookie of a console session to a response.

    `secure` is True if the browser uses https. The browser then never sends the cookie without TLS.
    """
    max_age = max(1, int(session.expires_at - time.time()))
    # Because of `httponly`, scripts cannot read the cookie. Because of `samesite`, requests of other sites do not have
    # the cookie.
    response.set_cookie(COOKIE, token, max_age=max_age, path="/", secure=secure, httponly=True, samesite="strict")


def _redeemed(request: Request, token: str | None) -> bytes:
    """Accept a sign-in link's token from this machine; return the digest of its key."""
    console: Console = request.app.state.console
    if not is_from_this_machine(request.scope):
        raise ApiError(
            403,
            "sign_in_link_not_local",
            "a sign-in link works only in a browser on the gateway's machine, at an address such as 127.0.0.1; "
            "sign in with an API key instead",
        )
    return console.links.redeem(token or "", console.link_keys)


def _response(
    request: Request, principal: Principal | None, session: Session | None, reason: str | None = None
) -> Response:
    """Return the response of `/api/session`, with the principal's account and role.

    Only admins and clients on this machine get the path of cortex.toml. Only clients on this machine learn whether
    sign-in links work.
    """
    console: Console = request.app.state.console
    settings = console.settings
    is_local = is_from_this_machine(request.scope)
    is_operator = is_local or (principal is not None and principal.role == "admin")
    config_file = console.gateway.config_file
    fields: dict[str, Any] = {
        "signed_in": principal is not None,
        "require_auth": console.gateway.authenticator.require_auth,
        "account_id": None if principal is None else principal.account_id,
        "key_id": None if principal is None else principal.key_id,
        "role": None if principal is None else principal.role,
        "reason": reason,
        "providers": ["oidc"] if settings.enabled and settings.oidc is not None else [],
        "bench_url": settings.bench_url,
        "config_file": str(config_file.absolute()) if is_operator and config_file is not None else None,
        "links": is_local and bool(console.link_keys),
    }
    if session is not None and principal is not None:
        fields |= {"csrf": session.csrf, "expires_at": session.expires_at}
    return JsonResponse(fields, headers=_NO_STORE)


async def get_root(request: Request) -> Response:
    """Respond with the console's page to browsers, with the health to other clients."""
    console: Console = request.app.state.console
    if console.settings.enabled and "text/html" in request.headers.get("accept", ""):
        page, policy = _page()
        headers = {"content-security-policy": policy, "cache-control": "no-cache", "vary": "accept", **SECURITY}
        return Response(page, headers=headers, media_type="text/html")
    return await get_health(request)


async def get_asset(request: Request) -> Response:
    """Respond with a script, style sheet or license of the console.

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
        "font-src 'self'; connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types dompurify"
    )
    return text, policy
