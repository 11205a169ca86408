"""Sign-in to the console with OpenID Connect, by Authlib.

1. `GET /console/oidc/login` sends the browser to the identity provider with a random state, and stores the state in a
   cookie of the browser. Nonce and PKCE verifier are computed from the state and a secret of this gateway. The gateway
   stores nothing, so many unfinished sign-ins cannot displace others.
2. The provider sends the browser back to `GET /console/oidc/callback` with a code and the state.
3. The gateway exchanges the code for an ID token, checks the token, and starts a session for the user's account.
"""

import base64
import hmac
import logging
import re
import secrets
import ssl
import time
from dataclasses import dataclass
from functools import cache
from typing import Any

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from helexa.core.errors import ApiError, HelexaError
from helexa.core.logs import quoted
from helexa.cortex.access.keys import Principal, Role, Window
from helexa.cortex.config import OidcSection
from helexa.cortex.console.sign_in_sessions_and_page import Console, set_cookie
from helexa.cortex.routes.access_and_errors import public

log = logging.getLogger(__name__)

PATH = "/console/oidc"
STATE_COOKIE = "helexa_oidc_state"
ATTEMPT_SECS = 600
METADATA_SECS = 600
TIMEOUT_SECS = 10.0

_ACCOUNT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@+-]{0,63}")  # names are used in URLs, headers and metrics
_MAX_STATE_CHARS = 200
_ALGORITHMS = ("RS256", "ES256", "PS256", "EdDSA")
# Accepted difference between the clocks of the provider and the gateway. Without it, a token could seem to be issued in
# the future.
_LEEWAY_SECS = 60
_CASELESS_CLAIMS = ("email", "preferred_username", "upn", "nickname")  # others, such as `sub`, are case-sensitive


@dataclass(frozen=True)
class _Attempt:
    """A sign-in that has begun."""

    state: str  # expiry time (Unix seconds), random text, and a message authentication code of both
    nonce: str  # text that the ID token must contain
    verifier: str  # PKCE code verifier, with which the gateway redeems the provider's code

    @classmethod
    def begin(cls, key: bytes) -> "_Attempt":
        """Return a new attempt, signed with `key`, which expires after `ATTEMPT_SECS`."""
        text = f"{int(time.time()) + ATTEMPT_SECS}.{secrets.token_urlsafe(24)}"
        return cls.of_state(key, f"{text}.{_code(key, 'state', text)}")

    @classmethod
    def of_state(cls, key: bytes, state: str) -> "_Attempt":
        return cls(state, _code(key, "nonce", state), _code(key, "verifier", state))

    def is_current(self, key: bytes) -> bool:
        """Return whether this gateway issued the state, and the state has not expired."""
        text, _, code = self.state.rpartition(".")
        is_own = hmac.compare_digest(code.encode(), _code(key, "state", text).encode())
        return is_own and int(text.partition(".")[0]) > time.time()


def _code(key: bytes, purpose: str, text: str) -> str:
    digest = hmac.digest(key, f"{purpose}:{text}".encode(), "sha256")
    return base64.urlsafe_b64encode(digest).decode().rstrip("=")


class Provider:
    """The identity provider, and the secret that authenticates the state of sign-ins."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._key = secrets.token_bytes(32)
        self._known: tuple[float, dict[str, Any]] = (0.0, {})  # expiry of the provider's metadata, and the metadata

    async def login(self, _request: Request) -> Response:
        """Send the browser to the identity provider.

        If the provider does not answer, the console shows a message.
        """
        settings = self._settings()
        try:
            metadata = await self._metadata(settings)
        except HelexaError as error:
            return _failed(error)
        attempt = _Attempt.begin(self._key)
        async with _client(settings) as client:
            url, _ = client.create_authorization_url(
                metadata["authorization_endpoint"],
                state=attempt.state,
                nonce=attempt.nonce,
                code_verifier=attempt.verifier,
            )
        response = RedirectResponse(url, 303, {"cache-control": "no-store"})
        response.set_cookie(
            STATE_COOKIE,
            attempt.state,
            ATTEMPT_SECS,
            path=PATH,
            secure=_secure(settings),
            httponly=True,
            samesite="lax",
        )
        return response

    async def callback(self, request: Request) -> Response:
        """Check the provider's answer, and start a session.

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
        state = request.query_params.get("state", "")[:_MAX_STATE_CHARS]
        attempt = _Attempt.of_state(self._key, state)
        same_browser = hmac.compare_digest(state.encode(), request.cookies.get(STATE_COOKIE, "").encode())
        if not same_browser or not attempt.is_current(self._key):
            raise HelexaError("the sign-in was not started in this browser, or took too long; start the sign-in again")
        if "code" not in request.query_params:
            answer = request.query_params.get("error", "without a code")[:100]
            raise HelexaError(
                f"the identity provider answered the sign-in with {answer!r}; sign in again, or see the provider's log"
            )
        metadata = await self._metadata(settings)
        claims = await _claims(settings, metadata, attempt, request.query_params["code"])
        return principal_of(settings, claims)

    async def _metadata(self, settings: OidcSection) -> dict[str, Any]:
        until, metadata = self._known
        if time.time() < until and str(metadata["issuer"]).rstrip("/") == settings.issuer:
            return metadata
        metadata = await _get(f"{settings.issuer}/.well-known/openid-configuration")
        if str(metadata.get("issuer", "")).rstrip("/") != settings.issuer:
            raise HelexaError(
                f"the identity provider names its issuer {str(metadata.get('issuer'))[:200]!r}, but "
                f"console.oidc.issuer is {settings.issuer!r}; correct console.oidc.issuer"
            )
        self._known = (time.time() + METADATA_SECS, metadata)
        return metadata

    def _settings(self) -> OidcSection:
        self._console.check_enabled()
        settings = self._console.settings.oidc
        if settings is None:
            raise ApiError(
                404, "oidc_disabled", "sign-in with OpenID Connect is not configured; add [console.oidc] to cortex.toml"
            )
        try:
            check_extra(settings)  # the configuration may have changed since the start
        except HelexaError as error:
            raise ApiError(503, "oidc_unavailable", str(error), type="api_error") from None
        return settings


def principal_of(settings: OidcSection, claims: dict[str, Any]) -> Principal:
    """Return the principal of an OpenID Connect user with the verified `claims`.

    Raises:
        HelexaError: the claims name no usable account, the e-mail address is not verified, or the account may not sign
            in.
    """
    account = claims.get(settings.account_claim)
    if not isinstance(account, str) or not _ACCOUNT.fullmatch(account):
        raise HelexaError(
            f"the claim {settings.account_claim!r} of the identity provider is missing, or is not a name that "
            "helexa can use; change console.oidc.account_claim"
        )
    if settings.account_claim == "email" and claims.get("email_verified") is not True:
        raise HelexaError(
            "the identity provider has not verified the e-mail address of this account; verify the address with the "
            "provider, and sign in again"
        )
    if settings.account_claim in _CASELESS_CLAIMS:
        account = account.lower()  # one user must not have two accounts, with a budget each
    role: Role | None = (
        "admin"
        if _matches(account, settings, settings.admins)
        else "user"
        if _matches(account, settings, settings.users)
        else None
    )
    if role is None:
        raise HelexaError(
            f"the account {account!r} is neither in console.oidc.users nor in console.oidc.admins; "
            "add the account to one of them"
        )
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
    """Raise HelexaError if OpenID Connect is configured, but Authlib is not installed."""
    if settings is None:
        return
    try:
        import authlib.integrations.httpx_client  # noqa: F401
    except ImportError as error:
        raise HelexaError(
            "[console.oidc] is configured, but Authlib is not installed; run `pip install 'helexa[oidc]'`"
        ) from error


def _failed(error: HelexaError) -> Response:
    log.warning(
        "sign-in with OpenID Connect failed error=%s; the browser shows only that the sign-in failed", quoted(error)
    )
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
        raise HelexaError(
            f"the identity provider's token is not accepted ({type(error).__name__}: {error}); "
            "check console.oidc.client_id and this machine's clock"
        ) from error
    return dict(claims)


async def _get(url: str) -> dict[str, Any]:
    import httpx2

    try:
        async with httpx2.AsyncClient(timeout=TIMEOUT_SECS, trust_env=False, verify=_tls()) as client:
            response = await client.get(url)
            response.raise_for_status()
            content = response.json()
    except (httpx2.HTTPError, ValueError) as error:
        raise HelexaError(
            f"the identity provider did not answer at {url} ({type(error).__name__}); "
            "try again, or check console.oidc.issuer"
        ) from error
    if not isinstance(content, dict):
        raise HelexaError(f"{url} did not answer with a JSON object; check console.oidc.issuer")
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
        verify=_tls(),
    )


@cache
def _tls() -> ssl.SSLContext:
    """Return the TLS settings that all HTTP clients of this module share."""
    # The settings are cached, because creating them blocks the event loop for 25 ms.
    import httpx2

    return httpx2.create_ssl_context(trust_env=False)


def _matches(account: str, settings: OidcSection, patterns: list[str]) -> bool:
    if settings.account_claim in _CASELESS_CLAIMS:
        patterns = [pattern.lower() for pattern in patterns]
    return any(account.endswith(pattern[1:]) if pattern.startswith("*") else account == pattern for pattern in patterns)


def _secure(settings: OidcSection) -> bool:
    return settings.public_url.startswith("https://")
