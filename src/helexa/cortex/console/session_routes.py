"""`/api/session`: who a request is, and sign-in and sign-out of browsers with a session cookie."""

import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from helexa.core.errors import ApiError
from helexa.cortex.access.key import digest_of
from helexa.cortex.access.principal import Principal
from helexa.cortex.api.admin_requests import SignIn
from helexa.cortex.console.console import Console
from helexa.cortex.console.sessions import COOKIE, Session, is_foreign
from helexa.http.json_response import JsonResponse

_NO_STORE = {"cache-control": "no-store"}


async def get_session(request: Request) -> Response:
    """Respond with the account and key of the request, and with the CSRF token of its session.

    A request without a valid key gets the reason, but no error status, so that a page can offer to sign in.
    """
    console: Console = request.app.state.console
    headers = request.scope["headers"]
    session, principal, reason = console.session(headers), None, None
    authenticator = console.gateway.authenticator
    try:
        principal = authenticator.admit(headers) if session is None else authenticator.principal_of(session.credential)
    except ApiError as error:
        reason = str(error)
    return JsonResponse(_json(console, principal, session, reason), headers=_NO_STORE)


async def sign_in(request: Request) -> Response:
    """Start a session for an API key. The response sets the session cookie."""
    console: Console = request.app.state.console
    console.check_enabled()
    headers = request.scope["headers"]
    if is_foreign(headers):
        raise ApiError(403, "origin_not_allowed", "a page of another origin may not sign in")
    body = await SignIn.read(request)
    digest = digest_of(body.key.strip().encode())
    principal = console.gateway.authenticator.principal_of(digest)
    console.sessions.end(headers)
    token, session = console.start_session(digest)
    response = JsonResponse(_json(console, principal, session, None), headers=_NO_STORE)
    set_cookie(response, token, session, secure=request.headers.get("origin", "").startswith("https://"))
    return response


async def sign_out(request: Request) -> Response:
    """End the session of the request, and delete its cookie."""
    console: Console = request.app.state.console
    headers = request.scope["headers"]
    if console.sessions.credential(headers) is None:
        raise ApiError(401, "no_session", "the request has no valid session cookie and CSRF token")
    console.sessions.end(headers)
    response = JsonResponse(_json(console, None, None, None), headers=_NO_STORE)
    response.delete_cookie(COOKIE, path="/", httponly=True, samesite="strict")
    return response


def set_cookie(response: Response, token: str, session: Session, *, secure: bool) -> None:
    """Add the session cookie to a response. Scripts cannot read the cookie, and other sites' pages cannot send it.

    `secure` is True if the browser uses https. The browser then never sends the cookie without TLS.
    """
    max_age = max(1, int(session.expires_at - time.time()))
    response.set_cookie(COOKIE, token, max_age=max_age, path="/", secure=secure, httponly=True, samesite="strict")


def _json(console: Console, principal: Principal | None, session: Session | None, reason: str | None) -> dict[str, Any]:
    settings = console.settings
    fields: dict[str, Any] = {
        "signed_in": principal is not None,
        "require_auth": console.gateway.authenticator.require_auth,
        "account_id": None if principal is None else principal.account_id,
        "key_id": None if principal is None else principal.key_id,
        "role": None if principal is None else principal.role,
        "reason": reason,
        "providers": ["oidc"] if settings.enabled and settings.oidc is not None else [],
        "bench_url": settings.bench_url,
    }
    if session is not None and principal is not None:
        fields |= {"csrf": session.csrf, "expires_at": session.expires_at}
    return fields
