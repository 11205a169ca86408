"""Errors and invalid responses of a hub: reported without retries, with the host and without secrets."""

import pytest

from helexa.neuron.sources import hub_http_client
from neuron.fake_hub import FakeHub, Fault
from neuron.sources.hub_node import FILE, NAME, WEIGHTS, Node


@pytest.mark.parametrize(
    ("fault", "kind", "message"),
    [
        (Fault(status=401), "repo_refused", "is private or does not exist at {url} (HTTP 401)"),
        (
            Fault(status=403, headers=(("X-Error-Code", "GatedRepo"),)),
            "repo_refused",
            "is gated at {url} (HTTP 403); accept the model's terms there, then set TEST_HUB_TOKEN",
        ),
        (Fault(status=404), "repo_refused", "does not exist at {url} (HTTP 404); check the name"),
        (
            Fault(status=429, headers=(("Retry-After", "3600"),)),
            "repo_fetch_failed",
            "from {url}, which limits requests (HTTP 429); try again in 3600 s",
        ),
        (Fault(body=WEIGHTS[::-1]), "invalid_source", "has checksum "),
        (Fault(body=WEIGHTS[:-1]), "invalid_source", "has 3071999 bytes at {url}, but 3072000 were announced"),
        (
            Fault(status=302, headers=(("Location", "file:///etc/passwd"),)),
            "repo_refused",
            "{url} redirects to an address that is not https or http",
        ),
    ],
    ids=["401", "gated", "404", "429", "wrong-hash", "wrong-size", "redirect"],
)
async def test_permanent_error_of_the_hub_is_reported_without_retry(
    hub: FakeHub, node: Node, pauses: list[float], fault: Fault, kind: str, message: str
):
    hub.inject(FILE, fault)
    error = await node.fetch_error()
    assert error.kind == kind
    assert message.format(url=hub.url) in str(error)
    assert error.details["model_id"] == NAME
    assert pauses == []
    assert not any(partial.stat().st_size for partial in node.partials())


async def test_error_for_a_rejected_hub_token_names_its_variable_and_not_the_token(
    hub: FakeHub, node: Node, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TEST_HUB_TOKEN", "hf_secret")
    hub.inject("list", Fault(status=401))
    error = await node.fetch_error()
    assert f"is refused by {hub.url} (HTTP 401); check the name, and whether the token in TEST_HUB_TOKEN" in str(error)
    assert "hf_secret" not in repr((error.details, str(error)))


async def test_malformed_hub_token_is_rejected_and_not_shown(node: Node, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TEST_HUB_TOKEN", "hf_secret\nhf_secret")
    error = await node.fetch_error()
    assert error.kind == "repo_refused"
    assert "or the token for it, has characters that HTTP does not allow" in str(error)
    assert "hf_secret" not in repr((error.details, str(error), error.__cause__))


async def test_hub_token_is_not_sent_to_redirect_targets(hub: FakeHub, node: Node, monkeypatch: pytest.MonkeyPatch):
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
async def test_malformed_file_list_of_the_hub_is_rejected(hub: FakeHub, node: Node, body: bytes):
    hub.inject("list", Fault(body=body))
    error = await node.fetch_error()
    assert error.kind == "repo_refused"
    assert f"{hub.url} does not speak the protocol of the Hugging Face Hub" in str(error)


async def test_file_list_that_the_hub_sends_too_slowly_is_aborted(
    hub: FakeHub, node: Node, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(hub_http_client, "_TEXT_SECONDS", 0.05)
    hub.inject("list", Fault(pace=0.1))
    error = await node.fetch_error()
    assert error.kind == "repo_fetch_failed"
    assert f"{hub.url} needs more than " in str(error)


@pytest.mark.parametrize(
    "name", ["../evil.gguf", "/etc/evil.gguf", "a//evil.gguf", "a/../evil.gguf", "e\nvil.gguf", "."]
)
async def test_file_name_in_a_hub_listing_cannot_leave_the_cache_folder(hub: FakeHub, node: Node, name: str):
    hub.repositories[NAME] = {name: WEIGHTS}
    assert (await node.fetch_error()).kind == "empty_repo"
    assert hub.downloads() == []
