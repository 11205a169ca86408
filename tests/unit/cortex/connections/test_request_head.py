"""Request ids, encoded bodies, and the addresses that require keys."""

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helexa.core.errors import ApiError, ConfigError
from helexa.cortex.access.proxies_exposure_and_cors import check_exposure
from helexa.cortex.config import CortexConfig
from helexa.http.content_coding import ACCEPTED
from helexa.http.headers import Headers, request_id, require_json

JSON = (b"content-type", b"application/json")


@pytest.mark.parametrize("given_id", ["abc", "A.b_c-1", "x" * 128])
def test_valid_request_id_of_the_client_is_used(given_id: str) -> None:
    assert request_id([(b"host", b"h"), (b"x-request-id", given_id.encode())]) == given_id


@pytest.mark.parametrize("given_id", [b"", b"a b", b"a\n", b"x" * 129, "é".encode(), b"a\x00", b'"', b"a;b"])
def test_invalid_request_id_of_the_client_is_replaced(given_id: bytes) -> None:
    assert request_id([(b"x-request-id", given_id)]).encode() != given_id


@given(st.lists(st.tuples(st.sampled_from([b"x-request-id", b"accept"]), st.binary(max_size=140))))
def test_request_id_has_only_safe_characters(headers: list[tuple[bytes, bytes]]) -> None:
    id = request_id(headers)
    assert 1 <= len(id) <= 128
    assert set(id) <= {*string.ascii_letters, *string.digits, *"._-"}


def test_generated_request_ids_differ() -> None:
    assert len({request_id([]) for _ in range(100)}) == 100


def test_body_in_an_unsupported_content_encoding_is_415() -> None:
    require_json([JSON, (b"accept-encoding", b"gzip")])
    require_json([JSON, (b"content-encoding", b" Identity ")])
    for encoding in (b"br", b"gzip, gzip", b"identity, gzip", b"x"):
        with pytest.raises(ApiError) as caught:
            require_json([JSON, (b"content-encoding", encoding)])
        assert (caught.value.status, caught.value.code) == (415, "unsupported_content_encoding")
        assert caught.value.headers() == {"Accept-Encoding": ACCEPTED}


@pytest.mark.parametrize("others", [[], [(b"content-type", b"text/json")], [JSON, (b"content-type", b"text/plain")]])
def test_request_without_exactly_one_json_content_type_is_415(others: Headers) -> None:
    with pytest.raises(ApiError, match="send the header 'Content-Type: application/json'") as caught:
        require_json(others)
    assert (caught.value.status, caught.value.code) == (415, "unsupported_media_type")


def config(listen: str, *, require_auth: bool = False, insecure: bool = False) -> CortexConfig:
    return CortexConfig.model_validate(
        {"gateway": {"listen": listen, "insecure": insecure}, "entitlements": {"require_auth": require_auth}}
    )


@pytest.mark.parametrize("listen", ["127.0.0.1:1", "127.8.9.1:1", "[::1]:1", "localhost:1", "[::ffff:127.0.0.1]:1"])
def test_gateway_on_a_loopback_address_needs_no_keys(listen: str) -> None:
    check_exposure(config(listen))


@pytest.mark.parametrize(
    "listen", ["0.0.0.0:1", "[::]:1", "10.0.0.1:1", "beast:1", "[::ffff:10.0.0.1]:1", "[fe80::1]:1"]
)
def test_gateway_on_a_network_address_requires_keys_or_option_insecure(listen: str) -> None:
    check_exposure(config(listen, require_auth=True))
    check_exposure(config(listen, insecure=True))
    with pytest.raises(ConfigError) as caught:
        check_exposure(config(listen))
    for remedy in ("127.0.0.1", "entitlements.require_auth = true", "--insecure", listen):
        assert remedy in str(caught.value)
