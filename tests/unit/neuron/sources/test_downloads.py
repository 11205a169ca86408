"""Shared, canceled, killed, damaged and concurrent downloads."""

import asyncio
import json
import random
import sys
import threading
from pathlib import Path

import pytest

from helexa.core.errors import ConfigError, SourceError
from helexa.neuron.config import read_config
from helexa.neuron.sources.hubs_and_sources import Sources
from neuron.fake_hub import FakeHub, Fault
from neuron.fake_models import until
from neuron.sources.hub_node import FILE, NAME, WEIGHTS, Node


async def test_canceled_download_resumes_where_it_ended(hub: FakeHub, node: Node):
    hub.inject(FILE, Fault(stall=1_500_000))
    fetching = asyncio.create_task(node.fetch())
    await until(lambda: any(partial.stat().st_size == 1_500_000 for partial in node.partials()))
    fetching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await fetching
    hub.stop()  # also ends the thread that reads from the hub
    restarted = FakeHub()
    restarted.repositories = hub.repositories
    restarted.start()
    try:
        node = Node(restarted, node.blobs.parents[1])
        assert (await node.fetch()).read_bytes() == WEIGHTS
    finally:
        restarted.stop()
    assert restarted.ranges == [(FILE, "bytes=1500000-")]
    assert ("download", len(WEIGHTS), len(WEIGHTS)) == node.reports[-1]


async def test_process_that_waits_for_a_download_resumes_it_if_the_downloader_is_killed(hub: FakeHub, node: Node):
    hub.inject(FILE, Fault(stall=1_500_000))
    script = f"""
import asyncio
from helexa.core.model_source_ids import ModelSource
from helexa.neuron.config import read_config
from helexa.neuron.sources.hubs_and_sources import Sources
sources = Sources(read_config(None, {node.environ!r}))
asyncio.run(sources.resolve(ModelSource.parse({NAME!r}), quant=None, progress=lambda *report: None))
"""
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", script)
    await until(lambda: any(partial.stat().st_size == 1_500_000 for partial in node.partials()))
    waiting = asyncio.create_task(node.fetch())
    await until(lambda: ("wait", 1_500_000, 0) in node.reports)
    child.kill()
    await child.wait()
    assert (await waiting).read_bytes() == WEIGHTS
    assert hub.ranges == [(FILE, "bytes=1500000-")]


async def test_partial_download_replaced_by_another_file_is_an_error_and_not_used(hub: FakeHub, node: Node):
    content = hub.answer

    def replace_partials(path: str):
        for partial in node.partials() if "resolve" in path else ():
            partial.unlink()
            partial.write_bytes(b"partial file of another process")
        return content(path)

    hub.answer = replace_partials
    error = await node.fetch_error()
    assert error.kind == "cache_failed"
    assert "was removed or replaced during its download" in str(error)
    hub.answer = content
    assert (await node.fetch()).read_bytes() == WEIGHTS


async def test_damaged_partial_download_is_discarded(hub: FakeHub, node: Node):
    path = await node.fetch()
    blob = path.resolve()
    blob.rename(f"{blob}.helexa.incomplete")
    (partial,) = node.partials()
    partial.write_bytes(b"x" * 1_000_000)
    assert (await node.fetch()).read_bytes() == WEIGHTS
    assert hub.ranges == [(FILE, "bytes=1000000-")]
    assert hub.downloads() == [FILE] * 3
    assert node.partials() == []


async def test_cached_file_of_the_wrong_size_is_downloaded_again(node: Node):
    path = await node.fetch()
    path.resolve().write_bytes(b"short")
    assert (await node.fetch()).read_bytes() == WEIGHTS


async def test_concurrent_loads_of_one_model_on_several_nodes_share_one_download(
    hub: FakeHub, node: Node, tmp_path: Path
):
    other_nodes = [Node(hub, tmp_path / "hub") for _ in range(2)]
    paths = await asyncio.gather(node.fetch(), *(other.fetch() for other in other_nodes))
    assert len(set(paths)) == 1
    assert paths[0].read_bytes() == WEIGHTS
    assert hub.downloads() == [FILE]


@pytest.mark.parametrize(("files", "environ", "at_once"), [(6, {}, 6), (12, {}, 8), (6, {"MAX_CONCURRENT": "3"}, 3)])
async def test_number_of_concurrent_file_downloads_stays_within_the_limit(
    hub: FakeHub, tmp_path: Path, files: int, environ: dict[str, str], at_once: int
):
    names = [f"model-{number}.safetensors" for number in range(files)]
    hub.repositories["org/dense"] = {"config.json": b"{}"} | {name: name.encode() * 500 for name in names}
    running = most = 0
    lock = threading.Lock()
    enough = threading.Event()
    usual = hub.answer

    def counting(path: str):
        nonlocal running, most
        if "resolve" in path:
            with lock:
                running += 1
                most = max(most, running)
                if running == at_once:
                    enough.set()
            enough.wait(60)
            with lock:
                running -= 1
        return usual(path)

    hub.answer = counting
    node = Node(hub, tmp_path, **{f"NEURON_DOWNLOADS__{name}": value for name, value in environ.items()})
    folder = await node.fetch("org/dense")
    assert at_once <= most <= int(environ.get("MAX_CONCURRENT", 8))
    assert {path.name for path in folder.iterdir()} == {"config.json", *names}
    assert [path for _, path, _ in hub.requests if path.startswith("/api/")] == ["/api/models/org/dense"]
    assert sum(hub.sent.values()) == sum(map(len, hub.repositories["org/dense"].values()))


async def test_interrupted_downloads_transfer_each_byte_once(hub: FakeHub, node: Node, pauses: list[float]):
    for number in range(6):
        hub.inject(f"model-{number}.safetensors", Fault(cut=7_000 * (number + 1)), Fault(cut=3_000))
    await node.fetch("org/dense")
    assert hub.sent == {name: len(content) for name, content in hub.repositories["org/dense"].items()}


@pytest.mark.parametrize("name", ["HELEXA_MAX_CONCURRENT_DOWNLOADS", "MAX_CONCURRENT_DOWNLOADS"])
@pytest.mark.parametrize("text", ["0", "65", "many", "-1", ""])
def test_download_limit_outside_1_to_64_is_rejected(name: str, text: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(name, text)
    with pytest.raises(ConfigError, match=f"^{name}: '{text}' is not a number from 1 to 64"):
        Sources(read_config(None, {}))


def test_download_limit_variable_of_helexa_takes_precedence(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HELEXA_MAX_CONCURRENT_DOWNLOADS", "3")
    monkeypatch.setenv("MAX_CONCURRENT_DOWNLOADS", "many")
    Sources(read_config(None, {}))


async def test_load_of_a_local_file_does_not_wait_for_downloads(hub: FakeHub, node: Node, tmp_path: Path):
    file = tmp_path / "model.gguf"
    file.touch()
    hub.inject("list", *[Fault(stall=0)] * 16)
    fetches = [asyncio.create_task(node.fetch()) for _ in range(16)]
    await until(lambda: len(hub.requests) == 16)
    assert await node.fetch(f"file:{file}") == file
    assert not any(fetch.done() for fetch in fetches)
    hub.stop()
    await asyncio.gather(*fetches, return_exceptions=True)


async def test_first_failed_file_cancels_the_other_downloads_of_the_model(hub: FakeHub, node: Node):
    hub.inject("model-0.safetensors", Fault(stall=10))
    hub.inject("model-5.safetensors", Fault(status=404))
    assert (await node.fetch_error("org/dense")).kind == "repo_refused"


async def test_huggingface_hub_library_can_read_the_download_cache(hub: FakeHub, node: Node, tmp_path: Path):
    from huggingface_hub import scan_cache_dir

    folder = await node.fetch("org/dense")
    cache = await asyncio.to_thread(scan_cache_dir, tmp_path / "hub")
    assert not cache.warnings
    (repository,) = cache.repos
    (revision,) = repository.revisions
    assert (repository.repo_id, revision.snapshot_path, revision.refs) == ("org/dense", folder, {"main"})
    assert {file.file_name for file in revision.files} == set(hub.repositories["org/dense"])


async def test_download_works_if_the_hub_lists_no_sizes_and_hashes(hub: FakeHub, node: Node):
    listing = {"sha": "0" * 40, "siblings": [{"rfilename": FILE}]}
    hub.inject("list", Fault(body=json.dumps(listing).encode()))
    usual = hub.answer
    hub.answer = lambda path: (200, {}, WEIGHTS) if "resolve" in path else usual(path)
    assert (await node.fetch()).read_bytes() == WEIGHTS


async def test_downloads_with_random_failures_never_yield_wrong_files(
    hub: FakeHub, tmp_path: Path, pauses: list[float]
):
    rng = random.Random(7)
    files = hub.repositories["org/dense"]
    faults = [
        *(Fault(cut=40_000), Fault(cut=0), Fault(status=500), Fault(status=429), Fault(ignore_range=True)),
        *(Fault(status=404), Fault(body=b"?" * 50_000)),
    ]
    kinds: set[str] = set()
    for number in range(15):
        node = Node(hub, tmp_path / str(number))
        for file in files:
            hub.inject(file, *rng.choices(faults, k=rng.choice([0, 0, 0, 1, 2])))
        tasks = [asyncio.create_task(node.fetch("org/dense")) for _ in range(3)]
        await until(lambda node=node: bool(node.reports))
        tasks[0].cancel()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(outcome, Path):
                visible = [
                    path for path in outcome.iterdir() if path.name[0] != "."
                ]  # the canceled fetch may still create links
                assert {path.name: path.read_bytes() for path in visible} == files
                kinds.add("whole")
            elif isinstance(outcome, SourceError):
                kinds.add(outcome.kind)
    assert {"whole"} < kinds <= {"whole", "repo_refused", "invalid_source"}
