"""What a hub refuses, or should not have sent: said at once, with the host and without secrets."""

import pytest

from helexa.neuron.sources import web
from neuron.fake_hub import FakeHub, Trouble
from neuron.sources.hub_node import FILE, NAME, WEIGHTS, Node


@pytest.mark.parametrize(
    ("trouble", "kind", "words"),
    [
        (Trouble(status=401), "repo_refused", "is private or does not exist at {url} (HTTP 401)"),
        (
            Trouble(status=403, headers=(("X-Error-Code", "GatedRepo"),)),
            "repo_refused",
            "is gated at {url} (HTTP 403): accept its terms there, then set TEST_HUB_TOKEN",
        ),
        (Trouble(status=404), "repo_refused", "does not exist at {url} (HTTP 404): check the name"),
        (
            Trouble(status=429, headers=(("Retry-After", "3600"),)),
            "repo_fetch_failed",
            "from {url}, which has had too many requests (HTTP 429): try again in 3600 s",
        ),
        (Trouble(body=WEIGHTS[::-1]), "invalid_source", "has checksum "),
        (Trouble(body=WEIGHTS[:-1]), "invalid_source", "has 3071999 bytes at {url}, but 3072000 were announced"),
        (
            Trouble(status=302, headers=(("Location", "file:///etc/passwd"),)),
            "repo_refused",
            "{url}, which redirects to an address that is not followed",
        ),
    ],
    ids=["401", "gated", "404", "429", "wrong-hash", "wrong-size", "redirect"],
)
async def test_what_will_not_pass_is_said_at_once(
    hub: FakeHub, node: Node, pauses: list[float], trouble: Trouble, kind: str, words: str
):
    hub.trouble(FILE, trouble)
    error = await node.refusal()
    assert error.kind == kind
    assert words.format(url=hub.url) in str(error)
    assert error.details["model_id"] == NAME
    assert pauses == []
    assert not any(partial.stat().st_size for partial in node.partials())


async def test_a_token_that_is_refused_is_named_and_never_shown(
    hub: FakeHub, node: Node, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TEST_HUB_TOKEN", "hf_secret")
    hub.trouble("list", Trouble(status=401))
    error = await node.refusal()
    assert f"is refused by {hub.url} (HTTP 401): check the name, and whether the token in TEST_HUB_TOKEN" in str(error)
    assert "hf_secret" not in repr((error.details, str(error)))


async def test_a_token_that_is_none_is_refused_and_never_shown(node: Node, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TEST_HUB_TOKEN", "hf_secret\nhf_secret")
    error = await node.refusal()
    assert error.kind == "repo_refused"
    assert "or the token for it, has characters that HTTP does not allow" in str(error)
    assert "hf_secret" not in repr((error.details, str(error), error.__cause__))


async def test_a_token_is_not_shown_to_where_a_file_is_redirected(
    hub: FakeHub, node: Node, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TEST_HUB_TOKEN", "hf_secret")
    hub.elsewhere = FakeHub()
    hub.elsewhere.repositories = hub.repositories
    hub.elsewhere.start()
    try:
        assert (await node.fetch()).read_bytes() == WEIGHTS
    finally:
        hub.elsewhere.stop()
    assert {token for _, _, token in hub.requests} == {"Bearer hf_secret"}
    assert [token for _, _, token in hub.elsewhere.requests] == [None]


@pytest.mark.parametrize("body", [b"<html>log in first</html>", b"[]", b'{"sha": "main"}', b"{" * 100_000])
async def test_a_listing_that_is_none_is_refused(hub: FakeHub, node: Node, body: bytes):
    hub.trouble("list", Trouble(body=body))
    error = await node.refusal()
    assert error.kind == "repo_refused"
    assert f"{hub.url}, which does not speak the protocol of the Hugging Face Hub" in str(error)


async def test_a_listing_that_trickles_is_given_up(hub: FakeHub, node: Node, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(web, "_TEXT_SECONDS", 0.05)
    hub.trouble("list", Trouble(pace=0.1))
    error = await node.refusal()
    assert error.kind == "repo_fetch_failed"
    assert f"{hub.url}, which sends its list too slowly" in str(error)


@pytest.mark.parametrize(
    "name", ["../evil.gguf", "/etc/evil.gguf", "a//evil.gguf", "a/../evil.gguf", "e\nvil.gguf", "."]
)
async def test_a_file_name_is_never_a_way_out_of_the_cache(hub: FakeHub, node: Node, name: str):
    hub.repositories[NAME] = {name: WEIGHTS}
    assert (await node.refusal()).kind == "empty_repo"
    assert hub.downloads() == []
