"""Sign-in to the console with OpenID Connect: the authorization code flow with PKCE, by Authlib.

1. `GET /console/oidc/login` sends the browser to the identity provider. The gateway remembers the attempt under a
   random state, which a cookie of this browser repeats.
2. The provider sends the browser back to `GET /console/oidc/callback` with a code and the state.
3. The gateway exchanges the code for an ID token, checks the token, and starts a session for the user's account.
"""

import hmac
import logging
import re
import time
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from helexa.core.errors import ApiError, HelexaError
from helexa.cortex.access.principal import Principal, Role, Window
from helexa.cortex.config import OidcSection
from helexa.cortex.console.console import Console
from helexa.cortex.console.session_routes import set_cookie
from helexa.cortex.routes.access import public

log = logging.getLogger(__name__)

PATH = "/console/oidc"
STATE_COOKIE = "helexa_oidc_state"
MAX_ATTEMPTS = 200
ATTEMPT_SECS = 600
METADATA_SECS = 600
TIMEOUT_SECS = 10.0

_ACCOUNT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@+-]{0,63}")  # names are used in URLs, headers and metrics
_ALGORITHMS = ("RS256", "ES256", "PS256", "EdDSA")
_LEEWAY_SECS = 60


@dataclass(frozen=True)
class _Attempt:
    nonce: str
    verifier: str
    expires_at: float


class Provider:
    """The identity provider, and the sign-ins that have begun there."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._attempts: dict[str, _Attempt] = {}  # by state, oldest first
        self._known: tuple[float, dict[str, Any]] = (0.0, {})  # expiry of the provider's metadata, metadata

    async def login(self, _request: Request) -> Response:
        """Send the browser to the identity provider. If the provider does not answer, the console shows a message."""
        settings = self._settings()
        try:
            metadata = await self._metadata(settings)
        except HelexaError as error:
            return _failed(error)
        from authlib.common.security import generate_token

        now = time.time()
        self._attempts = {state: one for state, one in self._attempts.items() if one.expires_at > now}
        if len(self._attempts) >= MAX_ATTEMPTS:
            del self._attempts[next(iter(self._attempts))]
        nonce, verifier = generate_token(32), generate_token(48)
        async with _client(settings) as client:
            url, state = client.create_authorization_url(
                metadata["authorization_endpoint"], nonce=nonce, code_verifier=verifier
            )
        self._attempts[state] = _Attempt(nonce, verifier, now + ATTEMPT_SECS)
        response = RedirectResponse(url, 303, {"cache-control": "no-store"})
        response.set_cookie(
            STATE_COOKIE, state, ATTEMPT_SECS, path=PATH, secure=_secure(settings), httponly=True, samesite="lax"
        )
        return response

    async def callback(self, request: Request) -> Response:
        """Check the provider's answer, start a session, and send the browser to the console.

        If the sign-in fails, the console shows the reason.
        """
        settings = self._settings()
        try:
            principal = await self._principal(settings, request)
        except HelexaError as error:
            response = _failed(error)
        else:
            token, session = self._console.start_session(principal)
            response = RedirectResponse("/", 303, {"cache-control": "no-store"})
            set_cookie(response, token, session, secure=_secure(settings))
        response.delete_cookie(STATE_COOKIE, path=PATH, httponly=True, samesite="lax")
        return response

    async def _principal(self, settings: OidcSection, request: Request) -> Principal:
        state = request.query_params.get("state", "")
        attempt = self._attempts.pop(state, None)
        same_browser = hmac.compare_digest(state.encode(), request.cookies.get(STATE_COOKIE, "").encode())
        if attempt is None or not same_browser or attempt.expires_at <= time.time():
            raise HelexaError("the sign-in was not started in this browser, or took too long")
        if "code" not in request.query_params:
            raise HelexaError(f"the provider answered {request.query_params.get('error', 'without a code')[:100]!r}")
        metadata = await self._metadata(settings)
        claims = await _claims(settings, metadata, attempt, request.query_params["code"])
        return principal_of(settings, claims)

    async def _metadata(self, settings: OidcSection) -> dict[str, Any]:
        until, metadata = self._known
        if time.time() < until and str(metadata["issuer"]).rstrip("/") == settings.issuer:
            return metadata
        metadata = await _get(f"{settings.issuer}/.well-known/openid-configuration")
        if str(metadata.get("issuer", "")).rstrip("/") != settings.issuer:
            raise HelexaError("the provider's configuration names another issuer")
        self._known = (time.time() + METADATA_SECS, metadata)
        return metadata

    def _settings(self) -> OidcSection:
        self._console.check_enabled()
        settings = self._console.settings.oidc
        if settings is None:
            raise ApiError(404, "oidc_disabled", "sign-in with OpenID Connect is not configured")
        try:
            check_extra(settings)  # the configuration may have changed since the start
        except HelexaError as error:
            raise ApiError(503, "oidc_unavailable", str(error), type="api_error") from None
        return settings


def principal_of(settings: OidcSection, claims: dict[str, Any]) -> Principal:
    """Return the principal of a user with the verified claims `claims`.

    Raises:
        HelexaError: the claims name no usable account, the e-mail address is not verified, or the account may not sign
            in.
    """
    account = claims.get(settings.account_claim)
    if not isinstance(account, str) or not _ACCOUNT.fullmatch(account):
        raise HelexaError(f"the claim {settings.account_claim!r} is missing, or is not a name that helexa can use")
    if settings.account_claim == "email" and claims.get("email_verified") is not True:
        raise HelexaError("the provider has not verified the e-mail address")
    role: Role | None = (
        "admin" if _matches(account, settings.admins) else "user" if _matches(account, settings.users) else None
    )
    if role is None:
        raise HelexaError("the account is neither in console.oidc.users nor in console.oidc.admins")
    return Principal(
        account_id=account,
        key_id=f"oidc:{account}",
        role=role,
        models=None if settings.models is None else frozenset(settings.models),
        hard_cap=settings.hard_cap,
        window=Window(settings.window.kind, settings.window.seconds),
        requests_per_minute=settings.requests_per_minute,
        tokens_per_minute=settings.tokens_per_minute,
        concurrency=settings.concurrency,
    )


def oidc_routes(console: Console) -> list[Route]:
    """Return the routes of the sign-in with OpenID Connect."""
    provider = Provider(console)
    return [Route(f"{PATH}/login", public(provider.login)), Route(f"{PATH}/callback", public(provider.callback))]


def check_extra(settings: OidcSection | None) -> None:
    """Raise an error if OpenID Connect is configured, but Authlib is not installed.

    Raises:
        HelexaError: the extra `oidc` is missing.
    """
    if settings is None:
        return
    try:
        import authlib.integrations.httpx_client  # noqa: F401
    except ImportError as error:
        raise HelexaError("sign-in with OpenID Connect needs Authlib: pip install 'helexa[oidc]'") from error


def _failed(error: HelexaError) -> Response:
    log.warning("sign-in with OpenID Connect failed: %s", error)
    return RedirectResponse("/#/sign-in-failed", 303, {"cache-control": "no-store"})


async def _claims(settings: OidcSection, metadata: dict[str, Any], attempt: _Attempt, code: str) -> dict[str, Any]:
    """Exchange the code for an ID token, and return the verified claims of the token."""
    from authlib.oauth2.base import OAuth2Error
    from authlib.oidc.core import CodeIDToken
    from httpx2 import HTTPError
    from joserfc import jwt
    from joserfc.errors import JoseError
    from joserfc.jwk import KeySet
    from joserfc.jws import JWSRegistry

    offered = metadata.get("id_token_signing_alg_values_supported") or ["RS256"]
    registry = JWSRegistry(algorithms=[name for name in _ALGORITHMS if name in offered], strict_check_header=False)
    try:
        async with _client(settings) as client:
            token = await client.fetch_token(
                metadata["token_endpoint"], grant_type="authorization_code", code=code, code_verifier=attempt.verifier
            )
        keys = KeySet.import_key_set(await _get(metadata["jwks_uri"]))  # pyright: ignore[reportArgumentType]
        decoded = jwt.decode(token["id_token"], keys, registry=registry)
        parameters = {"nonce": attempt.nonce, "client_id": settings.client_id, "access_token": token["access_token"]}
        options = {"iss": {"values": [metadata["issuer"]]}, "aud": {"values": [settings.client_id]}}
        claims = CodeIDToken(decoded.claims, decoded.header, options, parameters)
        claims.validate(leeway=_LEEWAY_SECS)
    except (OAuth2Error, HTTPError, JoseError, KeyError, ValueError) as error:
        raise HelexaError(f"the provider's token is not accepted: {type(error).__name__}: {error}") from error
    return dict(claims)


async def _get(url: str) -> dict[str, Any]:
    import httpx2

    try:
        async with httpx2.AsyncClient(timeout=TIMEOUT_SECS, trust_env=False) as client:
            response = await client.get(url)
            response.raise_for_status()
            content = response.json()
    except (httpx2.HTTPError, ValueError) as error:
        raise HelexaError(f"the identity provider did not answer: {type(error).__name__}") from error
    if not isinstance(content, dict):
        raise HelexaError("the identity provider did not answer with a JSON object")
    return content


def _client(settings: OidcSection) -> Any:
    """Return Authlib's client for the provider, an asynchronous context manager."""
    from authlib.integrations.httpx_client import AsyncOAuth2Client

    secret = None if settings.client_secret is None else settings.client_secret.get_secret_value()
    return AsyncOAuth2Client(
        settings.client_id,
        secret,
        scope="openid email profile",
        redirect_uri=f"{settings.public_url}{PATH}/callback",
        code_challenge_method="S256",
        timeout=TIMEOUT_SECS,
        trust_env=False,
    )


def _matches(account: str, patterns: list[str]) -> bool:
    return any(
        account.lower().endswith(pattern[1:].lower()) if pattern.startswith("*") else account.lower() == pattern.lower()
        for pattern in patterns
    )


def _secure(settings: OidcSection) -> bool:
    return settings.public_url.startswith("https://")
