"""Which hosts and IP addresses the gateway may fetch images from."""

import ipaddress

import pytest

from helexa.core.address import host_pattern
from helexa.cortex.image_fetcher import is_allowed, is_reachable


@pytest.mark.parametrize("text", ["a.example.com", "*", "*.example.com", "A.example.com:8080", "*:99", "[::1]:80"])
def test_valid_host_pattern_is_accepted_in_lower_case(text: str) -> None:
    assert host_pattern(text) == text.lower()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "::1",
        "*x.com",
        "a.*.com",
        "https://a.com",
        "a.com/x",
        "u@a.com",
        "a.com:0",
        "a.com:x",
        "**",
        ":80",
        "a.com?x",
    ],
)
def test_invalid_host_pattern_is_rejected(text: str) -> None:
    with pytest.raises(ValueError, match="is not a host"):
        host_pattern(text)


@pytest.mark.parametrize(
    ("host", "port", "pattern", "allowed"),
    [
        ("a.example.com", 443, "a.example.com", True),
        ("a.example.com", 8080, "a.example.com", False),
        ("a.example.com", 8080, "a.example.com:8080", True),
        ("a.example.com", 443, "*.example.com", True),
        ("b.a.example.com", 443, "*.example.com", True),
        ("example.com", 443, "*.example.com", False),
        ("evilexample.com", 443, "*.example.com", False),
        ("a.example.com.evil.com", 443, "*.example.com", False),
        ("a.example.com.", 443, "a.example.com", False),
        ("other.com", 80, "*", True),
        ("other.com", 22, "*", False),
        ("::1", 80, "[::1]", True),
        ("::1", 80, "*.1", False),
    ],
)
def test_host_is_allowed_only_if_a_configured_pattern_matches(
    host: str, port: int, pattern: str, *, allowed: bool
) -> None:
    assert is_allowed(host, port, {pattern}) == allowed
    assert not is_allowed(host, port, set())


@pytest.mark.parametrize(
    ("address", "reachable"),
    [
        ("93.184.215.14", True),
        ("2606:2800:21f:cb07:6820:80da:af6b:8b2c", True),
        ("::ffff:93.184.215.14", True),
        ("64:ff9b::5db8:d70e", True),
        *(
            (address, False)
            for address in (
                *("0.0.0.0", "10.0.0.1", "127.0.0.1", "100.64.0.1", "169.254.169.254", "172.16.0.1", "192.168.1.1"),
                *("192.0.2.1", "198.18.0.1", "224.0.0.1", "239.1.1.1", "240.0.0.1", "255.255.255.255"),
                *("::", "::1", "fe80::1", "fc00::1", "ff02::1", "ff0e::1", "2001:db8::1"),
                *("::ffff:127.0.0.1", "::ffff:169.254.169.254", "64:ff9b::a00:1", "2002:7f00:1::", "2001::1"),
                *("::127.0.0.1", "fec0::1", "64:ff9b:1::a00:1"),
            )
        ),
    ],
)
def test_images_are_fetched_only_from_public_addresses_by_default(address: str, *, reachable: bool) -> None:
    assert is_reachable(ipaddress.ip_address(address)) == reachable


def test_images_are_fetched_from_a_private_network_if_configured() -> None:
    networks = (ipaddress.ip_network("10.1.0.0/16"), ipaddress.ip_network("fd00::/8"))
    assert is_reachable(ipaddress.ip_address("10.1.2.3"), networks)
    assert is_reachable(ipaddress.ip_address("::ffff:10.1.2.3"), networks)
    assert is_reachable(ipaddress.ip_address("fd00::1"), networks)
    assert not is_reachable(ipaddress.ip_address("10.2.0.1"), networks)
