"""Transfer of one file from an unreliable hub: transient errors are retried, and the received file is correct."""

from pathlib import Path

import pytest

from helexa.neuron.sources import download
from helexa.neuron.sources.download import retry_delay
from helexa.neuron.sources.hub_http_client import WebError
from neuron.fake_hub import FakeHub, Fault
from neuron.sources.hub_node import FILE, WEIGHTS, Node


@pytest.mark.parametrize(
    ("faults", "expected_pauses"),
    [
        ([Fault(cut=2_000_000)], [1]),
        ([Fault(status=500)], [1]),
        ([Fault(status=503), Fault(status=502), Fault(cut=0)], [1, 2, 4]),
        ([Fault(status=429, headers=(("Retry-After", "7"),))], [7]),
        ([Fault(status=429, headers=(("Retry-After", "Wed, 21 Oct 2026 07:28:00 GMT"),))], [1]),
        ([Fault(cut=1_200_000), Fault(cut=1_200_000), Fault(cut=100_000), Fault(cut=0)], [1, 1, 2, 4]),
    ],
)
async def test_transient_download_error_is_retried(
    hub: FakeHub, node: Node, pauses: list[float], faults: list[Fault], expected_pauses: list[float]
):
    hub.inject(FILE, *faults)
    assert (await node.fetch()).read_bytes() == WEIGHTS
    assert pauses == expected_pauses
    assert node.partials() == []


async def test_stalled_download_connection_is_retried(hub: FakeHub, tmp_path: Path, pauses: list[float]):
    hub.inject(FILE, Fault(stall=1_000_000), Fault(stall=0))
    node = Node(hub, tmp_path, NEURON_DOWNLOADS__STALL_SECS="0.1")
    assert (await node.fetch()).read_bytes() == WEIGHTS
    assert pauses == [1, 2]
    assert hub.ranges == [(FILE, "bytes=1000000-")] * 2


async def test_slow_but_steady_download_may_take_longer_than_the_stall_timeout(
    hub: FakeHub, tmp_path: Path, pauses: list[float]
):
    hub.inject(FILE, Fault(pace=0.15))
    node = Node(hub, tmp_path, NEURON_DOWNLOADS__STALL_SECS="1.2")
    assert (await node.fetch()).read_bytes() == WEIGHTS
    assert pauses == []


async def test_download_error_names_the_host_that_stalls(hub: FakeHub, tmp_path: Path, pauses: list[float]):
    hub.inject(FILE, *[Fault(stall=0)] * 9)
    error = await Node(hub, tmp_path, NEURON_DOWNLOADS__STALL_SECS="0.1").fetch_error()
    assert error.kind == "repo_fetch_failed"
    assert f"could not be fetched: {hub.url} sent nothing for 0.1 s" in str(error)
    hub.inject("list", Fault(stall=0))
    error = await Node(hub, tmp_path, NEURON_DOWNLOADS__STALL_SECS="0.1").fetch_error()
    assert f"could not be fetched: {hub.url} sent nothing for 0.1 s" in str(error)


async def test_download_from_a_server_that_ignores_ranges_restarts_the_file(
    hub: FakeHub, node: Node, pauses: list[float]
):
    hub.inject(FILE, Fault(cut=2_000_000), Fault(ignore_range=True, cut=2_500_000), Fault(ignore_range=True))
    assert (await node.fetch()).read_bytes() == WEIGHTS
    assert hub.ranges == [(FILE, "bytes=2000000-"), (FILE, "bytes=2500000-")]
    assert node.reports[-1] == ("download", len(WEIGHTS), len(WEIGHTS))


async def test_repeatedly_truncated_download_fails_and_resumes_later(hub: FakeHub, node: Node, pauses: list[float]):
    hub.inject(FILE, *[Fault(ignore_range=True, cut=400_000)] * 9)
    error = await node.fetch_error()
    assert error.kind == "repo_fetch_failed"
    assert f"{hub.url} closed the connection after 400000 of 3072000 bytes" in str(error)
    assert pauses == [1, 2, 4, 8]
    (partial,) = node.partials()
    assert partial.read_bytes() == WEIGHTS[:400_000]
    hub.faults.clear()
    assert (await node.fetch()).read_bytes() == WEIGHTS
    assert hub.ranges[-1] == (FILE, "bytes=400000-")


@pytest.mark.parametrize(
    ("failures", "error", "seconds"),
    [
        (1, WebError("", ""), 1),
        (4, WebError("", "", status=500), 8),
        (5, WebError("", "", status=500), None),
        (1, WebError("", "", status=404, transient=False), None),
        (4, WebError("", "", status=429, retry_after=60), 60),
        (1, WebError("", "", status=429, retry_after=61), None),
        (1, WebError("", "", status=429, retry_after=0), 1),
    ],
)
def test_pauses_between_download_retries_grow_up_to_a_maximum(failures: int, error: WebError, seconds: int | None):
    assert retry_delay(failures, error) == seconds


async def test_huge_file_is_downloaded_in_several_ranges(hub: FakeHub, node: Node, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(download, "_MAX_RANGE_BYTES", 1_200_000)
    assert (await node.fetch()).read_bytes() == WEIGHTS
    assert [byte_range for _, byte_range in hub.ranges] == [
        "bytes=0-1199999",
        "bytes=1200000-2399999",
        "bytes=2400000-",
    ]


async def test_download_uses_the_configured_http_proxy(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("http_proxy", hub.url)
    endpoint = {"NEURON_HARNESS__TORCH__SOURCES__HUGGINGFACE__ENDPOINT": "http://hub.invalid"}
    assert (await Node(hub, tmp_path, **endpoint).fetch()).read_bytes() == WEIGHTS
