"""Sessions: cookies, CSRF tokens, expiry, bounds, and what a session may do."""

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from cortex.fake_node import FakeNode
from cortex.running_gateway import Cortex, running_cortex
from helexa.cortex.access.keys import Principal
from helexa.cortex.console import sign_in_sessions_and_page
from helexa.cortex.console.sign_in_sessions_and_page import COOKIE, CSRF_HEADER, Sessions
from helexa.http.headers import Headers

ADMIN, USER = "the-admin-key", "a-user-key"
KEYS = [
    {"key": ADMIN, "account_id": "ops", "role": "admin"},
    {"key": USER, "account_id": "alice", "hard_cap": 5000},
]
DIGEST = bytes(32)


@pytest.fixture
async def keyed(node: FakeNode) -> AsyncIterator[Cortex]:
    async with running_cortex(node, settings={"entitlements": {"require_auth": True, "keys": KEYS}}) as cortex:
        yield cortex


@dataclass
class Client:
    """A client that sends the session cookie itself, and the CSRF token unless it is cleared."""

    cortex: Cortex
    cookie: str = ""
    csrf: str = ""
    set_cookie: str = ""
    origin: str = ""
    headers: dict[str, str] = field(default_factory=dict)

    async def __call__(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        headers = {**self.headers}
        headers |= {"cookie": f"other=1; {COOKIE}={self.cookie}"} if self.cookie else {}
        headers |= {CSRF_HEADER: self.csrf} if self.csrf else {}
        headers |= {"origin": self.origin} if self.origin else {}
        async with self.cortex.client.request(method, self.cortex.url + path, json=body, headers=headers) as response:
            self.set_cookie = response.headers.get("set-cookie", self.set_cookie)
            return response.status, await response.json()

    async def sign_in(self, key: str = ADMIN) -> None:
        status, session = await self("POST", "/api/session", {"key": key})
        assert status == 200, session
        self.cookie = self.set_cookie.partition(";")[0].partition("=")[2]
        self.csrf = session["csrf"]


@pytest.fixture
async def client(keyed: Cortex) -> Client:
    return Client(keyed)


async def test_session_cookie_is_hidden_from_scripts_and_other_sites(client: Client) -> None:
    await client.sign_in()
    flags = {flag.strip().lower() for flag in client.set_cookie.split(";")[1:]}
    assert {"httponly", "samesite=strict", "path=/"} <= flags and "secure" not in flags
    assert ADMIN not in client.set_cookie
    client.origin = client.cortex.url.replace("http:", "https:")
    await client.sign_in()
    assert "secure" in client.set_cookie.lower()


async def test_request_of_a_session_needs_cookie_and_csrf_token(client: Client) -> None:
    await client.sign_in()
    assert (await client("GET", "/api/nodes"))[0] == 200
    cookie, csrf = client.cookie, client.csrf
    for client.cookie, client.csrf in ((cookie, ""), ("", csrf), (cookie, "wrong"), ("wrong", csrf), (csrf, cookie)):
        for method, path in (("GET", "/api/nodes"), ("POST", "/api/nodes/n1/cordon"), ("POST", "/api/keys")):
            assert (await client(method, path))[0] == 401
    client.cookie, client.csrf = cookie, csrf
    assert not (await client("GET", "/api/nodes"))[1]["nodes"][0]["cordoned"]


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.example"},
        {"origin": "http://127.0.0.1:1"},
        {"origin": "null"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
    ],
)
async def test_web_page_of_another_origin_cannot_use_the_session(client: Client, headers: dict[str, str]) -> None:
    await client.sign_in()
    client.headers = headers
    assert (await client("POST", "/api/nodes/n1/cordon"))[0] == 401
    _, session = await client("GET", "/api/session")
    assert not session["signed_in"] and "csrf" not in session
    assert (await client("POST", "/api/session", {"key": ADMIN}))[0] == 403


async def test_console_session_shows_its_account_and_ends_at_sign_out(client: Client) -> None:
    await client.sign_in(USER)
    _, session = await client("GET", "/api/session")
    assert (session["account_id"], session["role"]) == ("alice", "user")
    assert session["csrf"] == client.csrf
    assert (await client("GET", "/api/nodes"))[0] == 403
    assert (await client("DELETE", "/api/session"))[0] == 200
    assert (await client("GET", "/v1/models"))[0] == 401
    assert (await client("DELETE", "/api/session"))[0] == 401


async def test_new_sign_in_of_a_browser_ends_its_old_session(client: Client) -> None:
    await client.sign_in(USER)
    old = Client(client.cortex, client.cookie, client.csrf)
    await client.sign_in(ADMIN)
    assert (await old("GET", "/v1/models"))[0] == 401
    assert (await client("GET", "/v1/models"))[0] == 200


async def test_requests_of_a_session_are_charged_to_its_key(client: Client) -> None:
    await client.sign_in(USER)
    body = {"model": "Org/M", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9}
    assert (await client("POST", "/v1/chat/completions", body))[0] == 200
    _, keys = await client("GET", "/api/keys")
    assert [(key["account_id"], key["spent"]) for key in keys["keys"]] == [("alice", 9)]


async def test_session_cookie_and_csrf_token_are_not_forwarded_to_a_node(client: Client, node: FakeNode) -> None:
    await client.sign_in(USER)
    body = {"model": "Org/M", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9}
    assert (await client("POST", "/v1/chat/completions", body))[0] == 200
    assert not {"cookie", CSRF_HEADER} & node.headers[-1].keys()
    assert client.cookie not in str(node.headers) and client.csrf not in str(node.headers)


async def test_revoking_a_key_ends_its_console_sessions(client: Client) -> None:
    await client.sign_in()
    _, made = await client("POST", "/api/keys", {"account_id": "dora"})
    dora = Client(client.cortex)
    await dora.sign_in(made["key"])
    assert (await dora("GET", "/v1/models"))[0] == 200
    await client("DELETE", f"/api/keys/{made['key_id']}")
    status, body = await dora("GET", "/v1/models")
    assert (status, body["error"]["message"]) == (401, "this API key was revoked; use another one")
    _, session = await dora("GET", "/api/session")
    assert not session["signed_in"] and session["reason"] == "this API key was revoked; use another one"


@pytest.mark.parametrize("key", ["unknown", "x" * 512, " "])
async def test_sign_in_with_an_unknown_key_is_rejected(client: Client, key: str) -> None:
    assert (await client("POST", "/api/session", {"key": key}))[0] == 401
    assert client.set_cookie == ""


@pytest.mark.parametrize("body", [{}, {"key": ""}, {"key": "x" * 513}, {"key": 1}, {"key": "a", "b": 1}, []])
async def test_malformed_sign_in_request_is_400(client: Client, body: Any) -> None:
    assert (await client("POST", "/api/session", body))[0] == 400


async def test_sign_in_to_a_disabled_console_is_rejected(node: FakeNode) -> None:
    settings = {"entitlements": {"require_auth": True, "keys": KEYS}, "console": {"enabled": False}}
    async with running_cortex(node, settings=settings) as cortex:
        status, body = await Client(cortex)("POST", "/api/session", {"key": ADMIN})
        assert (status, body["error"]["code"]) == (404, "console_disabled")


def headers_of(token: str, csrf: str) -> Headers:
    return [(b"cookie", f"{COOKIE}={token}".encode()), (CSRF_HEADER.encode(), csrf.encode())]


def test_console_session_ends_after_its_lifetime() -> None:
    now = 1000.0
    store = Sessions(lambda: now)
    token, session = store.start(DIGEST, 60)
    assert store.credential(headers_of(token, session.csrf)) == DIGEST
    now += 60
    assert store.credential(headers_of(token, session.csrf)) is None
    assert store.of_cookie(headers_of(token, session.csrf)) is None


def test_oldest_console_sessions_end_if_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sign_in_sessions_and_page, "MAX_SESSIONS", 5)
    monkeypatch.setattr(sign_in_sessions_and_page, "MAX_SESSIONS_PER_CREDENTIAL", 2)
    store = Sessions()
    own = [store.start(DIGEST, 60) for _ in range(4)]
    assert [store.credential(headers_of(token, one.csrf)) for token, one in own] == [None, None, DIGEST, DIGEST]
    for number in range(10):
        store.start(Principal("a", str(number)), 60)
    assert len(store) == 5


def test_stored_sessions_do_not_contain_the_cookie_value() -> None:
    store = Sessions()
    token, _ = store.start(DIGEST, 60)
    assert token not in repr(store.__dict__)
