"""Sign-in links: who can make them, where and how often they work, and what they allow."""

import base64
from collections.abc import AsyncIterator
from typing import Any

import pytest

from cortex.console.test_sessions import Client
from cortex.fake_node import FakeNode
from cortex.running_gateway import Cortex, running_cortex
from helexa.core.errors import ApiError
from helexa.cortex.access import sign_in_links
from helexa.cortex.access.keys import Key, Principal, digest_of
from helexa.cortex.access.proxies_exposure_and_cors import is_from_this_machine
from helexa.cortex.access.sign_in_links import LIFETIME_SECS, SignInLinks, sign_in_url

OWNER, USER = "the-owners-key", "a-users-key"
KEYS = [
    {"key": OWNER, "account_id": "owner", "role": "admin"},
    {"key": USER, "account_id": "alice"},
]
STATIC = [Key(Principal("owner", "owner", "admin"), digest_of(OWNER.encode()))]


class Clock:
    now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def laptop(node: FakeNode) -> AsyncIterator[Cortex]:
    """A gateway as `helexa up` starts it on a loopback address: without required keys, with an admin's key."""
    async with running_cortex(node, settings={"entitlements": {"keys": KEYS}}) as cortex:
        yield cortex


def token_of(secret: str = OWNER, clock: Any = None, url: str = "http://127.0.0.1:1") -> str:
    return (sign_in_url(url, secret, clock) if clock else sign_in_url(url, secret)).rpartition("/")[2]


def rejected(links: SignInLinks, token: str) -> str:
    with pytest.raises(ApiError) as caught:
        links.redeem(token, STATIC)
    return caught.value.code


def test_sign_in_link_is_rejected_at_its_second_use(clock: Clock) -> None:
    links, token = SignInLinks(clock), token_of(clock=clock)
    assert links.redeem(token, STATIC) == STATIC[0].digest
    assert rejected(links, token) == "invalid_sign_in_link"
    assert links.redeem(token_of(clock=clock), STATIC) == STATIC[0].digest


def test_expired_sign_in_link_is_rejected(clock: Clock) -> None:
    links, token = SignInLinks(clock), token_of(clock=clock)
    clock.now += LIFETIME_SECS
    assert rejected(links, token) == "invalid_sign_in_link"


def test_sign_in_link_does_not_survive_a_restart_of_the_gateway(clock: Clock) -> None:
    """A new process does not know which links were used."""
    token = token_of(clock=clock)
    clock.now += 1
    assert rejected(SignInLinks(clock), token) == "invalid_sign_in_link"


def test_sign_in_link_with_an_expiry_too_far_in_the_future_is_rejected(clock: Clock) -> None:
    links = SignInLinks(clock)
    assert rejected(links, token_of(clock=lambda: clock.now + 3600)) == "invalid_sign_in_link"


def test_malformed_and_foreign_sign_in_tokens_are_rejected(clock: Clock) -> None:
    links, token = SignInLinks(clock), token_of(clock=clock)
    content = base64.urlsafe_b64decode(token)
    flipped = [content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :] for at in range(len(content))]
    forged = [base64.urlsafe_b64encode(changed).decode() for changed in flipped]
    for bad in (*forged, token_of("another-key", clock), token[:-4], token + "AAAA", "é" * 40, "=" * 40, "", "A" * 40):
        assert rejected(links, bad) == "invalid_sign_in_link"
    assert links.redeem(token, STATIC)


def test_sign_in_fails_while_the_maximum_number_of_used_links_is_unexpired(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sign_in_links, "MAX_LINKS", 2)
    links = SignInLinks(clock)
    for _ in range(2):
        links.redeem(token_of(clock=clock), STATIC)
    assert rejected(links, token_of(clock=clock)) == "rate_limit_exceeded"
    clock.now += LIFETIME_SECS
    assert links.redeem(token_of(clock=clock), STATIC)


async def test_sign_in_link_allows_changes_on_a_gateway_without_required_keys(laptop: Cortex) -> None:
    client = Client(laptop)
    assert (await client("POST", "/api/nodes/n1/cordon"))[0] == 401
    status, session = await client("POST", "/api/session", {"link": token_of()})
    assert (status, session["account_id"], session["role"]) == (200, "owner", "admin")
    flags = {flag.strip().lower() for flag in client.set_cookie.split(";")[1:]}
    assert {"httponly", "samesite=strict"} <= flags
    client.cookie = client.set_cookie.partition(";")[0].partition("=")[2]
    assert (await client("POST", "/api/nodes/n1/cordon"))[0] == 401  # a cookie without its CSRF token
    client.csrf = session["csrf"]
    assert (await client("POST", "/api/nodes/n1/cordon"))[0] == 200
    assert (await client("POST", "/api/keys", {"account_id": "dora"}))[0] == 201


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({"origin": "http://evil.example"}, "origin_not_allowed"),
        ({"sec-fetch-site": "cross-site"}, "origin_not_allowed"),
        ({"host": "rebound.example:31313"}, "host_not_allowed"),
        ({"x-forwarded-for": "203.0.113.9"}, "sign_in_link_not_local"),
        ({"forwarded": "for=203.0.113.9"}, "sign_in_link_not_local"),
    ],
)
async def test_sign_in_link_opened_from_elsewhere_is_rejected_and_not_used_up(
    laptop: Cortex, headers: dict[str, str], code: str
) -> None:
    client, token = Client(laptop, headers=headers), token_of()
    status, body = await client("POST", "/api/session", {"link": token})
    assert (status, body["error"]["code"], client.set_cookie) == (403, code, "")
    assert (await Client(laptop)("POST", "/api/session", {"link": token}))[0] == 200


async def test_sign_in_link_made_with_a_key_that_is_no_admins_is_rejected(laptop: Cortex) -> None:
    assert (await Client(laptop)("POST", "/api/session", {"link": token_of(USER)}))[0] == 401


async def test_path_of_the_configuration_file_is_not_shown_to_remote_clients(node: FakeNode, tmp_path: Any) -> None:
    path = tmp_path / "cortex.toml"
    path.write_text(
        f'[ledger]\nurl = "sqlite:{tmp_path}/cortex.db"\n[[neurons]]\nname = "n1"\nendpoint = "{node.url}"\n'
        f'[[entitlements.keys]]\nkey = "{OWNER}"\naccount_id = "owner"\nrole = "admin"\n'
        '[entitlements]\nrequire_auth = true\n[gateway]\nlisten = "0.0.0.0:1"\n',
        encoding="utf-8",
    )
    async with running_cortex(path=path, ready=False) as cortex:
        _, local = await Client(cortex)("GET", "/api/session")
        _, forwarded = await Client(cortex, headers={"x-forwarded-for": "203.0.113.9"})("GET", "/api/session")
        _, named = await Client(cortex, headers={"host": "rebound.example"})("GET", "/api/session")
    assert (local["config_file"], local["links"]) == (str(path), True)
    assert [(one["config_file"], one["links"]) for one in (forwarded, named)] == [(None, False)] * 2


@pytest.mark.parametrize(
    ("client", "server", "host", "is_local"),
    [
        ("127.0.0.1", "127.0.0.1", "127.0.0.1:31313", True),
        ("::1", "::1", "[::1]:31313", True),
        ("127.0.0.1", "127.0.0.1", "localhost", True),
        ("192.0.2.7", "192.0.2.7", "192.0.2.7:31313", True),  # a gateway on a network address, from its own machine
        ("192.0.2.8", "192.0.2.7", "192.0.2.7:31313", False),
        ("192.0.2.8", "192.0.2.7", "127.0.0.1", False),
        ("127.0.0.1", "127.0.0.1", "gateway.example", False),
        ("127.0.0.1", "127.0.0.1", "", False),
    ],
)
def test_only_direct_requests_from_this_machine_count_as_local(
    client: str, server: str, host: str, is_local: bool
) -> None:
    scope = {"client": (client, 5), "server": (server, 31313), "headers": [(b"host", host.encode())]}
    assert is_from_this_machine(scope) is is_local
    assert not is_from_this_machine(scope | {"client": None})
