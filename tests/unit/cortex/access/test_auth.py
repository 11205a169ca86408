"""The authenticator, without sockets and with a fixed clock: accepted and rejected keys."""

import dataclasses
import logging
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helexa.core.errors import ApiError, ConfigError
from helexa.cortex.access.auth import Authenticator, allows, authorize, shown_secret
from helexa.cortex.access.keys import (
    MAX_SECRET_BYTES,
    Key,
    Principal,
    Window,
    digest_of,
    hint_of,
    new_secret,
    static_keys,
)
from helexa.cortex.config import EntitlementsSection

ALICE = Principal("alice", "alice-laptop")
ROOT = Principal("ops", "ops-1", role="admin")

blanks = st.sampled_from([b"", b" ", b"  ", b"\t"])
token = st.binary(min_size=1, max_size=600).filter(lambda value: value == value.strip() != b"")

INVALID = "invalid API key; check the key, or create one with `cortex keys create`"


def key(principal: Principal, secret: bytes, **fields: Any) -> Key:
    return Key(principal, digest_of(secret), **fields)


def new_authenticator(*, require_auth: bool = True, now: float = 100.0) -> Authenticator:
    authenticator = Authenticator(require_auth, [key(ALICE, b"alice's")], lambda: now)
    authenticator.replace(
        [
            key(ROOT, b"root's"),
            key(Principal("bob", "bob"), b"bob's", revoked_at=5.0),
            key(Principal("eve", "eve", expires_at=100.0), b"eve's"),
            key(Principal("dan", "dan", expires_at=100.1), b"dan's"),
        ]
    )
    return authenticator


def bearer(secret: bytes) -> list[tuple[bytes, bytes]]:
    return [(b"host", b"h"), (b"authorization", b"Bearer " + secret)]


def error_of(authenticator: Authenticator, headers: list[tuple[bytes, bytes]]) -> tuple[int, str | None, str, str]:
    with pytest.raises(ApiError) as caught:
        authenticator.admit(headers)
    return caught.value.status, caught.value.code, caught.value.type, str(caught.value)


MISSING = "missing API key; supply 'Authorization: Bearer <key>'"


@pytest.mark.parametrize(
    ("headers", "message"),
    [
        ([], MISSING),
        ([(b"authorization", b"")], MISSING),
        ([(b"authorization", b"Bearer")], MISSING),
        ([(b"authorization", b"Bearer   ")], MISSING),
        ([(b"authorization", b"alice's")], MISSING),
        ([(b"authorization", b"Basic alice's")], MISSING),
        ([(b"x-api-key", b" ")], MISSING),
        (bearer(b"placeholder"), INVALID),
        (bearer(b"alice's "[:-2]), INVALID),
        (
            [(b"x-api-key", b"x" * (MAX_SECRET_BYTES + 1))],
            INVALID,
        ),
    ],
)
def test_missing_or_unknown_api_key_is_rejected(headers: list[tuple[bytes, bytes]], message: str) -> None:
    assert error_of(new_authenticator(), headers) == (401, "invalid_api_key", "invalid_request_error", message)
    assert new_authenticator(require_auth=False).admit(headers) is None


@pytest.mark.parametrize("require_auth", [True, False])
@pytest.mark.parametrize(
    "headers",
    [
        bearer(b"alice's"),
        [(b"authorization", b"bEARER   alice's  ")],
        [(b"x-api-key", b"alice's")],
        [(b"x-api-key", b"alice's"), *bearer(b"alice's")],
        [(b"x-api-key", b""), *bearer(b"alice's")],
        [(b"authorization", b"Basic eDp5"), (b"x-api-key", b"alice's")],
    ],
)
def test_known_api_key_returns_its_principal(require_auth: bool, headers: list[tuple[bytes, bytes]]) -> None:
    assert new_authenticator(require_auth=require_auth).admit(headers) is ALICE


@pytest.mark.parametrize("require_auth", [True, False])
def test_revoked_or_expired_api_key_is_rejected(require_auth: bool) -> None:
    authenticator = new_authenticator(require_auth=require_auth)
    assert error_of(authenticator, bearer(b"bob's"))[0::3] == (
        401,
        "this API key was revoked; use another one",
    )
    assert error_of(authenticator, bearer(b"eve's"))[0::3] == (
        401,
        "this API key has expired; use another one",
    )
    assert authenticator.admit(bearer(b"dan's")) is not None


@pytest.mark.parametrize("require_auth", [True, False])
def test_request_with_two_different_api_keys_is_rejected(require_auth: bool) -> None:
    for headers in ([*bearer(b"alice's"), (b"x-api-key", b"root's")], [*bearer(b"alice's"), *bearer(b"other")]):
        status, code, _, message = error_of(new_authenticator(require_auth=require_auth), headers)
        assert (status, code) == (400, "conflicting_api_keys")
        assert "two different API keys" in message


def test_api_key_for_another_server_beside_a_known_one_is_ignored() -> None:
    """Anthropic's libraries send both keys that the environment has."""
    for mine, other in ((bearer(b"alice's"), b"sk-ant-1"), (bearer(b"sk-ant-oat"), b"alice's")):
        for headers in ([*mine, (b"x-api-key", other)], [(b"x-api-key", other), *mine]):
            for require_auth in (True, False):
                assert new_authenticator(require_auth=require_auth).admit(headers) is ALICE
    strangers = [*bearer(b"sk-ant-oat"), (b"x-api-key", b"sk-ant-1")]
    assert new_authenticator(require_auth=False).admit(strangers) is None
    assert error_of(new_authenticator(), strangers)[3] == INVALID
    revoked = [*bearer(b"alice's"), (b"x-api-key", b"bob's")]
    assert error_of(new_authenticator(), revoked)[:2] == (400, "conflicting_api_keys")


def test_replacing_the_keys_from_the_database_keeps_the_configured_keys() -> None:
    authenticator = new_authenticator()
    assert authenticator.admit(bearer(b"root's")) == ROOT
    authenticator.replace([key(Principal("x", "x"), b"x's"), key(ROOT, b"alice's", revoked_at=1.0)])
    assert authenticator.admit(bearer(b"x's")) is not None
    assert authenticator.admit(bearer(b"alice's")) is ALICE
    assert error_of(authenticator, bearer(b"root's"))[3] == INVALID


def test_api_keys_above_the_length_limit_are_rejected() -> None:
    endless = b"x" * (MAX_SECRET_BYTES + 1)
    assert Authenticator(False, [key(ALICE, endless)]).admit(bearer(endless)) is None
    assert Authenticator(False, [key(ALICE, endless[1:])]).admit(bearer(endless[1:])) is ALICE


def test_admin_endpoints_require_an_admin_key() -> None:
    for require_auth in (True, False):
        authenticator = new_authenticator(require_auth=require_auth)
        assert authenticator.admit_admin(bearer(b"root's")) == ROOT
        for headers, status in ((bearer(b"alice's"), 403), ([], 401), (bearer(b"unknown"), 401)):
            with pytest.raises(ApiError) as caught:
                authenticator.admit_admin(headers)
            assert caught.value.status == status


def test_key_with_a_model_list_may_use_only_these_models() -> None:
    some = dataclasses.replace(ALICE, models=frozenset({"Org/M"}))
    assert allows(None, "Org/X")
    assert allows(ALICE, "Org/X")
    assert (allows(some, "Org/M"), allows(some, "Org/X")) == (True, False)
    assert not allows(dataclasses.replace(ALICE, models=frozenset()), "Org/M")
    authorize(some, "Org/M", "small")
    with pytest.raises(ApiError) as caught:
        authorize(some, "Org/X", "large")
    assert (caught.value.status, caught.value.code) == (403, "model_not_allowed")
    assert "'large'" in str(caught.value)
    assert "Org/X" not in str(caught.value.envelope())


@given(st.lists(st.tuples(st.sampled_from([b"authorization", b"x-api-key", b"accept"]), st.binary(max_size=40))))
def test_arbitrary_authorization_headers_admit_no_principal(headers: list[tuple[bytes, bytes]]) -> None:
    try:
        assert new_authenticator(require_auth=False).admit(headers) is None
    except ApiError as error:
        assert error.status == 400


@given(token, blanks, blanks, st.sampled_from([b"Bearer ", b"bearer ", b"BEARER  "]))
def test_spaces_around_the_key_in_authorization_headers_are_removed(
    secret: bytes, leading: bytes, trailing: bytes, scheme: bytes
) -> None:
    assert shown_secret([(b"x-api-key", leading + secret + trailing)]) == secret
    assert shown_secret([(b"authorization", leading + scheme + secret + trailing)]) == secret


def test_new_api_keys_are_random_and_never_printed(caplog: pytest.LogCaptureFixture) -> None:
    secrets = {new_secret().get_secret_value() for _ in range(100)}
    assert len(secrets) == 100
    for secret in secrets:
        assert secret.startswith("hlx_") and len(secret) == 47 and secret[4:].isalnum() and secret.isascii()
    secret = new_secret()
    assert secret.get_secret_value() not in repr(secret)
    assert secret.get_secret_value().startswith(hint_of(secret)) and len(hint_of(secret)) == 8
    stored_key = key(ALICE, secret.get_secret_value().encode())
    assert stored_key.digest.hex() not in repr(stored_key) and repr(stored_key.digest) not in repr(stored_key)
    with caplog.at_level(logging.DEBUG):
        new_authenticator(require_auth=False).admit(bearer(b"s3cret"))
    assert "s3cret" not in caplog.text


def section(*keys: dict[str, Any]) -> EntitlementsSection:
    return EntitlementsSection.model_validate({"keys": keys})


def test_api_keys_are_read_from_the_configuration() -> None:
    (stored_key,) = static_keys(
        section(
            {
                "key": "s",
                "account_id": "a",
                "models": ["Org/M"],
                "hard_cap": 5,
                "window": {"kind": "rolling", "seconds": 60},
                "concurrency": 2,
            }
        )
    )
    assert stored_key.principal == Principal(
        "a", "a", models=frozenset({"Org/M"}), hard_cap=5, window=Window("rolling", 60), concurrency=2
    )
    assert stored_key.digest == digest_of(b"s")
    same = {"account_id": "a", "key_id": "k"}
    assert len(static_keys(section({"key": "old", **same}, {"key": "new", **same}))) == 2


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ([{"key": "", "account_id": "a"}], "empty"),
        ([{"key": " s", "account_id": "a"}], "blanks"),
        ([{"key": "s" * 513, "account_id": "a"}], "too long"),
        ([{"key": "s3", "account_id": "a\r\nx-admin: 1"}], "other than printable ASCII"),
        (
            [{"key": "s3", "account_id": "a"}, {"key": "s3", "account_id": "b"}],
            "entry 2 ('b') has the same key as an earlier",
        ),
        (
            [{"key": "s3", "account_id": "a"}, {"key": "s4", "account_id": "a", "hard_cap": 1}],
            "differ in account, role or limits",
        ),
    ],
)
def test_invalid_api_keys_in_the_configuration_are_rejected(keys: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        static_keys(section(*keys))
    assert message in str(caught.value)
    assert "s3" not in str(caught.value)
