"""The cache: full or unwritable disks, and models that load without their hub."""

import errno
import os
import shutil
from pathlib import Path

import pytest

from helexa.neuron.sources import snapshot as snapshots
from helexa.neuron.sources.hub_http_client import Site, WebError
from neuron.fake_hub import FakeHub, Fault
from neuron.sources.hub_node import FILE, NAME, WEIGHTS, Node

# --- disk errors


async def test_too_large_model_is_rejected_before_the_download(
    hub: FakeHub, node: Node, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr(snapshots.Snapshots, "free_bytes", lambda self: 3_000_000)
    error = await node.fetch_error()
    assert error.kind == "disk_full"
    assert error.details["required_bytes"] == len(WEIGHTS)
    assert error.details["free_bytes"] == 3_000_000
    assert f"needs 3.1 MB, but 3.0 MB are free in {tmp_path / 'hub'}" in str(error)
    assert hub.downloads() == []


async def test_full_disk_during_a_download_is_a_disk_full_error_without_a_partial_file(
    hub: FakeHub, node: Node, tmp_path: Path
):
    path = await node.fetch()
    blob = path.resolve()
    blob.unlink()
    Path(f"{blob}.helexa.incomplete").symlink_to("/dev/full")
    error = await node.fetch_error()
    assert error.kind == "disk_full"
    cause = f"the disk with {tmp_path / 'hub'} is full"
    assert f"cannot be cached: {cause}; free some space, or configure another cache folder" in str(error)
    assert not blob.exists()


async def test_unwritable_cache_folder_is_named_in_the_error(hub: FakeHub, tmp_path: Path):
    with pytest.raises(OSError) as caught:
        os.mkdir("/sys/helexa")  # noqa: PTH102
    assert caught.value.errno in (errno.EPERM, errno.EACCES, errno.EROFS)
    error = await Node(hub, Path("/sys/helexa")).fetch_error()
    assert error.kind == "cache_unwritable"
    assert "cannot be cached: the folder /sys/helexa cannot be written" in str(error)


# --- without a hub


async def test_complete_cached_model_loads_offline_without_requests(
    hub: FakeHub, node: Node, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    folder = await node.fetch("org/dense")
    hub.requests.clear()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert await node.fetch("org/dense") == folder
    error = await node.fetch_error()
    assert error.kind == "not_cached"
    assert f"HF_HUB_OFFLINE is set, and {tmp_path / 'hub'} has none of the model's files" in str(error)
    for number in (1, 4):
        (folder / f"model-{number}.safetensors").unlink()
    error = await node.fetch_error("org/dense")
    assert f"{tmp_path / 'hub'} lacks model-1.safetensors, model-4.safetensors" in str(error)
    assert hub.requests == []


async def test_with_refresh_off_only_missing_files_are_requested_from_the_hub(hub: FakeHub, tmp_path: Path):
    node = Node(hub, tmp_path / "hub", refresh=False)
    folder = await node.fetch("org/dense")
    hub.requests.clear()
    node.reports.clear()
    assert await node.fetch("org/dense") == folder
    assert (hub.requests, node.reports) == ([], [])
    (folder / "model-2.safetensors").resolve().unlink()
    assert await node.fetch("org/dense") == folder
    assert hub.downloads() == ["model-2.safetensors"]


@pytest.mark.parametrize("fault", [Fault(status=500), Fault(status=404), Fault(body=b"?"), Fault(cut=3)])
async def test_cached_model_loads_if_the_hub_listing_fails(hub: FakeHub, node: Node, fault: Fault):
    path = await node.fetch()
    hub.inject("list", fault)
    assert await node.fetch() == path
    assert not hub.faults["list"], "the hub was not asked"


async def test_failed_hub_listing_is_retried_if_the_model_is_not_cached(hub: FakeHub, node: Node, pauses: list[float]):
    hub.inject("list", Fault(status=503), Fault(status=429, headers=(("Retry-After", "3"),)))
    assert (await node.fetch()).read_bytes() == WEIGHTS
    assert pauses == [1, 3]
    hub.repositories["org/other"] = {}
    hub.inject("list", *[Fault(status=503)] * 3)
    assert "answered HTTP 503" in str(await node.fetch_error("org/other"))


async def test_failed_download_of_an_update_keeps_the_cached_version_in_use(
    hub: FakeHub, node: Node, pauses: list[float]
):
    path = await node.fetch()
    hub.repositories[NAME] = {FILE: WEIGHTS[::-1]}
    hub.inject(FILE, Fault(status=404))
    assert await node.fetch() == path
    assert path.read_bytes() == WEIGHTS
    assert (await node.fetch()).read_bytes() == WEIGHTS[::-1]


async def test_error_names_the_unreachable_hub_and_the_missing_files(hub: FakeHub, node: Node):
    folder = await node.fetch("org/dense")
    (folder / "model-3.safetensors").unlink()
    hub.stop()
    error = await node.fetch_error("org/dense")
    assert error.kind == "repo_fetch_failed"
    assert "refuses connections" in str(error)
    assert "lacks model-3.safetensors" in str(error)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://user:secret@127.0.0.1:1/base?key=secret", "http://127.0.0.1:1"),
        ("http://user:secret@127.0.0.1/", "http://127.0.0.1"),
        ("http://127.0.0.1:secret", "an endpoint"),
        ("http://[::1", "an endpoint"),
        ("http://", "an endpoint"),
    ],
)
def test_hub_error_shows_only_the_origin_of_the_url_and_no_credentials(url: str, shown: str):
    with pytest.raises(WebError) as caught:
        Site(url, None, 1).get("/x")
    assert caught.value.where == shown
    assert "is not a valid address" in str(caught.value)
    assert "secret" not in str(caught.value)


async def test_cached_quantization_of_an_older_commit_loads_without_the_hub(hub: FakeHub, node: Node):
    older = await node.fetch()
    hub.repositories[NAME] = {"tiny-Q4_0.gguf": WEIGHTS}
    newer = await node.fetch()
    hub.stop()
    assert await node.fetch() == newer
    newer.unlink()
    assert await node.fetch() == older


async def test_model_deleted_from_its_repository_loads_from_the_cache(hub: FakeHub, node: Node):
    path = await node.fetch()
    hub.repositories[NAME] = {"README.md": b"moved"}
    assert await node.fetch() == path


# --- incomplete models


@pytest.mark.parametrize("offline", [False, True])
async def test_incompletely_downloaded_model_is_not_used(
    hub: FakeHub, tmp_path: Path, pauses: list[float], monkeypatch: pytest.MonkeyPatch, offline: bool
):
    node = Node(
        hub, tmp_path / "hub", NEURON_DOWNLOADS__MAX_CONCURRENT="1"
    )  # one at a time, so the last file by name is requested last
    hub.repositories["org/dense"] |= {"tokenizer.json": b"a", "tokenizer_config.json": b"b"}
    hub.inject("tokenizer_config.json", *[Fault(status=500)] * 5)
    assert (await node.fetch_error("org/dense")).kind == "repo_fetch_failed"
    if offline:
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    hub.stop()
    error = await node.fetch_error("org/dense")
    assert error.kind == ("not_cached" if offline else "repo_fetch_failed")
    assert f"{tmp_path / 'hub'} lacks tokenizer_config.json" in str(error)


async def test_download_of_one_model_does_not_complete_a_partial_model_of_the_repository(
    hub: FakeHub, tmp_path: Path, pauses: list[float], monkeypatch: pytest.MonkeyPatch
):
    node = Node(hub, tmp_path / "hub", NEURON_DOWNLOADS__MAX_CONCURRENT="1")
    hub.repositories["org/dense"] |= {"tokenizer.json": b"a", "vocab.txt": b"b", FILE: WEIGHTS}
    hub.inject("vocab.txt", *[Fault(status=500)] * 5)
    await node.fetch_error("org/dense")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "lacks vocab.txt" in str(await node.fetch_error("org/dense"))
    monkeypatch.delenv("HF_HUB_OFFLINE")
    assert (await node.fetch("org/dense", quant="q8_0")).name == FILE
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "lacks vocab.txt" in str(await node.fetch_error("org/dense"))
    assert (await node.fetch("org/dense", quant="q8_0")).name == FILE


async def test_model_downloaded_by_huggingface_hub_loads_if_complete(
    hub: FakeHub, node: Node, monkeypatch: pytest.MonkeyPatch
):
    names = ["config.json", "tokenizer.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    hub.repositories["org/dense"] = {name: name.encode() for name in names}
    folder = await node.fetch("org/dense")
    shutil.rmtree(folder.parents[1] / ".helexa")  # huggingface_hub does not write this folder
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert await node.fetch("org/dense") == folder
    for name in names[1:3]:
        content = (folder / name).resolve()
        aside = content.rename(content.with_name("aside"))
        assert f"lacks {name}" in str(await node.fetch_error("org/dense"))
        aside.rename(content)
