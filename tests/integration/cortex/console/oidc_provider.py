"""An OpenID Connect provider on a real socket, which signs in one user without asking."""

import base64
import hashlib
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlencode

from aiohttp import web
from joserfc import jwt
from joserfc.jwk import RSAKey

CLIENT_ID, CLIENT_SECRET = "helexa-console", "the-client-secret"


@dataclass
class Provider:
    """The provider's user, and what a test makes wrong.

    Attributes:
        claims: claims of the user; they replace the correct claims of the ID token.
        signing_key: the key that signs ID tokens; another key than the published one makes the signature wrong.
        denied: True if the user refuses to sign in.
        authorizations: queries of the authorization requests.
    """

    url: str = ""
    claims: dict[str, Any] = field(default_factory=lambda: {"email": "alice@example.com", "email_verified": True})
    key: RSAKey = field(default_factory=lambda: RSAKey.generate_key(2048, {"kid": "k1"}))
    signing_key: RSAKey | None = None
    denied: bool = False
    authorizations: list[dict[str, str]] = field(default_factory=list)
    codes: dict[str, dict[str, str]] = field(default_factory=dict)

    @asynccontextmanager
    async def serving(self, host: str = "127.0.0.1") -> AsyncIterator["Provider"]:
        app = web.Application()
        app.router.add_get("/.well-known/openid-configuration", self._metadata)
        app.router.add_get("/authorize", self._authorize)
        app.router.add_post("/token", self._token)
        app.router.add_get("/keys", self._keys)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://{host}:{runner.addresses[0][1]}"
        try:
            yield self
        finally:
            await runner.cleanup()

    async def _metadata(self, _request: web.Request) -> web.Response:
        return web.json_response(
            {
                "issuer": self.url,
                "authorization_endpoint": f"{self.url}/authorize",
                "token_endpoint": f"{self.url}/token",
                "jwks_uri": f"{self.url}/keys",
                "id_token_signing_alg_values_supported": ["RS256"],
            }
        )

    async def _authorize(self, request: web.Request) -> web.Response:
        query = dict(request.query)
        self.authorizations.append(query)
        answer = {"state": query["state"], "error": "access_denied"}
        if not self.denied:
            code = secrets.token_hex(8)
            self.codes[code] = query
            answer = {"state": query["state"], "code": code}
        raise web.HTTPFound(f"{query['redirect_uri']}?{urlencode(answer)}")

    async def _token(self, request: web.Request) -> web.Response:
        form = await request.post()
        query = self.codes.pop(str(form["code"]), None)
        credentials = base64.b64encode(f"{CLIENT_ID}:{CLIENT_SECRET}".encode()).decode()
        digest = hashlib.sha256(str(form["code_verifier"]).encode()).digest()
        challenge = base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
        if (
            query is None
            or request.headers.get("authorization") != f"Basic {credentials}"
            or form["redirect_uri"] != query["redirect_uri"]
            or (query["code_challenge"], query["code_challenge_method"]) != (challenge, "S256")
        ):
            return web.json_response({"error": "invalid_grant"}, status=400)
        now = int(time.time())
        correct = {"iss": self.url, "sub": "u1", "aud": CLIENT_ID, "iat": now, "exp": now + 60, "nonce": query["nonce"]}
        token = jwt.encode({"alg": "RS256", "kid": "k1"}, correct | self.claims, self.signing_key or self.key)
        return web.json_response({"access_token": "a", "token_type": "Bearer", "id_token": token})

    async def _keys(self, _request: web.Request) -> web.Response:
        return web.json_response({"keys": [self.key.as_dict(private=False)]})


def settings(provider: Provider, public_url: str = "http://gateway.example", **options: Any) -> dict[str, Any]:
    """Return the sections of a gateway's configuration that let users of the provider sign in."""
    oidc = {"issuer": provider.url, "client_id": CLIENT_ID, "client_secret": CLIENT_SECRET, "public_url": public_url}
    lists = {"users": ["*@example.com"], "admins": ["boss@example.com"]}
    return {"entitlements": {"require_auth": True}, "console": {"oidc": {**oidc, **lists, **options}}}
