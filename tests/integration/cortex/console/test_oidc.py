"""Sign-in with OpenID Connect against a provider that the test starts."""

from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import quote

import aiohttp
import pytest
from joserfc.jwk import RSAKey

from cortex.console.oidc_provider import Provider, settings
from cortex.fake_node import FakeNode
from cortex.running_gateway import Cortex, running_cortex
from helexa.cortex.config import CortexConfig
from helexa.cortex.console.oidc import principal_of


@pytest.fixture
async def provider() -> AsyncIterator[Provider]:
    async with Provider().serving() as provider:
        yield provider


@pytest.fixture
async def gateway(node: FakeNode, provider: Provider) -> AsyncIterator[Cortex]:
    async with running_cortex(node, settings=settings(provider, hard_cap=5000)) as cortex:
        cortex.gateway.config.console.oidc.public_url = cortex.url  # type: ignore[union-attr]
        yield cortex


class Browser:
    """A client with a cookie jar."""

    def __init__(self, gateway: Cortex) -> None:
        self.url = gateway.url
        self.session = aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True))

    async def __aenter__(self) -> "Browser":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.session.close()

    async def login(self) -> tuple[str, dict[str, Any]]:
        """Follow the sign-in; return the last redirect and the session."""
        return await self.open(f"{self.url}/console/oidc/login"), await self.whoami()

    async def open(self, url: str) -> str:
        """Open a URL, follow its redirects, and return the target of the last redirect."""
        async with self.session.get(url) as response:
            return response.history[-1].headers["location"]

    async def whoami(self) -> dict[str, Any]:
        async with self.session.get(f"{self.url}/api/session") as response:
            return await response.json()


async def test_oidc_sign_in_gives_the_account_its_configured_role_and_budget(
    gateway: Cortex, provider: Provider
) -> None:
    async with Browser(gateway) as browser:
        last, session = await browser.login()
        assert last == "/" and session["signed_in"]
        assert (session["account_id"], session["key_id"]) == ("alice@example.com", "oidc:alice@example.com")
        assert (session["role"], session["providers"]) == ("user", ["oidc"])
        [query] = provider.authorizations
        assert query["code_challenge_method"] == "S256" and "openid" in query["scope"].split()
        headers = {"x-helexa-csrf": session["csrf"]}
        body = {"model": "Org/M", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 6000}
        url = f"{gateway.url}/v1/chat/completions"
        async with browser.session.post(url, json=body, headers=headers) as response:
            assert (response.status, (await response.json())["error"]["code"]) == (429, "insufficient_quota")


async def test_oidc_account_listed_as_admin_signs_in_with_the_role_admin(gateway: Cortex, provider: Provider) -> None:
    provider.claims["email"] = "Boss@example.com"
    async with Browser(gateway) as browser:
        assert (await browser.login())[1]["role"] == "admin"


@pytest.mark.parametrize(
    "claims",
    [
        {"email": "eve@evil.example"},
        {"email": "alice@example.com.evil.example"},
        {"email_verified": False},
        {"email_verified": "true"},
        {"email": "a\nb@example.com"},
        {"email": None},
        {"iss": "http://other.example"},
        {"aud": "another-client"},
        {"nonce": "another-nonce"},
        {"exp": 1},
    ],
)
async def test_sign_in_with_claims_that_allow_no_account_is_rejected(
    gateway: Cortex, provider: Provider, claims: dict[str, Any]
) -> None:
    provider.claims |= claims
    async with Browser(gateway) as browser:
        last, session = await browser.login()
        assert last == "/#/sign-in-failed" and not session["signed_in"]


async def test_id_token_with_a_wrong_signature_is_rejected(gateway: Cortex, provider: Provider) -> None:
    provider.signing_key = RSAKey.generate_key(2048, {"kid": "k1"})
    async with Browser(gateway) as browser:
        assert not (await browser.login())[1]["signed_in"]


async def test_sign_in_denied_by_the_oidc_provider_leads_to_the_sign_in_failed_page(
    gateway: Cortex, provider: Provider
) -> None:
    provider.denied = True
    async with Browser(gateway) as browser:
        last, session = await browser.login()
        assert last == "/#/sign-in-failed" and not session["signed_in"]


async def test_oidc_callback_url_opened_in_another_browser_is_rejected(gateway: Cortex, provider: Provider) -> None:
    """An attacker cannot sign a victim in to the attacker's account with a link."""
    async with Browser(gateway) as attacker, Browser(gateway) as victim:
        async with attacker.session.get(f"{gateway.url}/console/oidc/login", allow_redirects=False) as response:
            authorize = response.headers["location"]
        async with attacker.session.get(authorize, allow_redirects=False) as response:
            callback = response.headers["location"]
        assert await victim.open(callback) == "/#/sign-in-failed"
        assert not (await victim.whoami())["signed_in"]
        assert await attacker.open(callback) == "/"
        assert await attacker.open(callback) == "/#/sign-in-failed"  # the attempt is used up


async def test_pending_oidc_sign_in_succeeds_after_250_other_sign_ins_were_started(gateway: Cortex) -> None:
    async with Browser(gateway) as browser, aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar()) as others:
        login = f"{gateway.url}/console/oidc/login"
        async with browser.session.get(login, allow_redirects=False) as response:
            authorize = response.headers["location"]
        for _ in range(250):
            async with others.get(login, allow_redirects=False) as response:
                assert response.status == 303
        assert await browser.open(authorize) == "/"


@pytest.mark.parametrize("state", ["", "x", "9999999999.a.b", "{}.x", "é.é.é"])
async def test_oidc_state_that_the_gateway_did_not_issue_is_rejected(gateway: Cortex, state: str) -> None:
    async with Browser(gateway) as browser:
        cookies = {"cookie": f"helexa_oidc_state={quote(state)}"}
        url = f"{gateway.url}/console/oidc/callback?code=1&state={quote(quote(state))}"
        async with browser.session.get(url, headers=cookies, allow_redirects=False) as response:
            assert response.headers["location"] == "/#/sign-in-failed"


async def test_expired_sign_in_attempt_is_rejected(gateway: Cortex, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("helexa.cortex.console.oidc.ATTEMPT_SECS", -1)
    async with Browser(gateway) as browser:
        assert (await browser.login())[0] == "/#/sign-in-failed"


@pytest.mark.parametrize(
    ("claim", "value", "account", "role"),
    [
        ("email", "Alice@Example.COM", "alice@example.com", "user"),
        ("preferred_username", "ALICE@example.com", "alice@example.com", "user"),
        ("email", "BOSS@example.com", "boss@example.com", "admin"),
        ("sub", "U1@example.com", "U1@example.com", "user"),
        ("sub", "Boss@example.com", "Boss@example.com", "user"),
    ],
)
def test_account_names_that_differ_only_in_case_are_one_account(
    claim: str, value: str, account: str, role: str
) -> None:
    configured = settings(Provider(url="http://p"), account_claim=claim, users=["*@example.com"])
    oidc = CortexConfig.model_validate(configured).console.oidc
    assert oidc is not None
    principal = principal_of(oidc, {claim: value, "email_verified": True})
    assert (principal.account_id, principal.role) == (account, role)


async def test_sign_in_with_an_unreachable_oidc_provider_leads_to_the_failed_page(node: FakeNode) -> None:
    provider = Provider(url="http://127.0.0.1:1")
    async with running_cortex(node, settings=settings(provider)) as cortex, Browser(cortex) as browser:
        assert (await browser.login())[0] == "/#/sign-in-failed"


async def test_oidc_routes_are_404_without_an_oidc_configuration(cortex: Cortex) -> None:
    for path in ("login", "callback"):
        async with cortex.client.get(f"{cortex.url}/console/oidc/{path}") as response:
            assert response.status == 404


def test_oidc_configuration_that_admits_no_users_is_an_error() -> None:
    with pytest.raises(ValueError, match="no account may sign in"):
        CortexConfig.model_validate(settings(Provider(url="http://p"), users=[], admins=[]))
