"""Downloads from a local hub that has its bad days: what arrives is right, and what fails says why."""

import asyncio
import errno
import json
import os
import random
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from helexa.core.errors import ConfigError, SourceError
from helexa.core.source import ModelSource
from helexa.neuron.config import read_config
from helexa.neuron.sources import Sources, transfer
from helexa.neuron.sources import snapshot as snapshots
from helexa.neuron.sources.fetch import Fetch
from helexa.neuron.sources.transfer import pause
from helexa.neuron.sources.web import Site, WebError
from neuron.fake_hub import FakeHub, Trouble
from neuron.fake_models import until

WEIGHTS = bytes(range(256)) * 12000  # 3 MB
NAME = "org/tiny"
FILE = "tiny-Q8_0.gguf"


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    hub = FakeHub()
    hub.repositories[NAME] = {FILE: WEIGHTS}
    hub.repositories["org/dense"] = {
        "config.json": b"{}",
        "model.safetensors.index.json": json.dumps(
            {"weight_map": {str(number): f"model-{number}.safetensors" for number in range(6)}}
        ).encode(),
        **{f"model-{number}.safetensors": b"%d" % number * 50_000 for number in range(6)},
    }
    hub.start()
    yield hub
    hub.stop()


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses between tries, which take no time here."""
    asked: list[float] = []
    wait = Fetch.wait

    def shortly(fetch: Fetch, seconds: float) -> None:
        asked.append(seconds)
        wait(fetch, 0.001)

    monkeypatch.setattr(Fetch, "wait", shortly)
    return asked


class Node:
    """Sources as a node has them, with one hub."""

    def __init__(self, hub: FakeHub, folder: Path, **more: str) -> None:
        self.blobs = folder / f"models--{NAME.replace('/', '--')}" / "blobs"
        self.reports: list[tuple[str, int, int]] = []
        environ = {
            "NEURON_HARNESS__TORCH__SOURCES__HUGGINGFACE__ENDPOINT": hub.url,
            "NEURON_HARNESS__TORCH__SOURCES__HUGGINGFACE__AUTH_ENV": "TEST_HUB_TOKEN",
            "NEURON_HARNESS__TORCH__HF_CACHE": str(folder),
        }
        self.environ = environ | more
        self.sources = Sources(read_config(None, self.environ))

    async def fetch(self, name: str = NAME) -> Path:
        path = await self.sources.resolve(
            ModelSource.parse(name), quant=None, progress=lambda *report: self.reports.append(report)
        )
        await asyncio.sleep(0)
        return path

    async def refusal(self, name: str = NAME) -> SourceError:
        with pytest.raises(SourceError) as refused:
            await self.fetch(name)
        assert "\n" not in str(refused.value)
        return refused.value

    def partials(self) -> list[Path]:
        return sorted(self.blobs.glob("*.incomplete"))


@pytest.fixture
def node(hub: FakeHub, tmp_path: Path) -> Node:
    return Node(hub, tmp_path / "hub")


# --- what goes on after a failure


@pytest.mark.parametrize(
    ("troubles", "asked"),
    [
        ([Trouble(cut=2_000_000)], [1]),
        ([Trouble(status=500)], [1]),
        ([Trouble(status=503), Trouble(status=502), Trouble(cut=0)], [1, 2, 4]),
        ([Trouble(status=429, headers=(("Retry-After", "7"),))], [7]),
        ([Trouble(status=429, headers=(("Retry-After", "Wed, 21 Oct 2026 07:28:00 GMT"),))], [1]),
        ([Trouble(cut=1_200_000), Trouble(cut=1_200_000), Trouble(cut=100_000), Trouble(cut=0)], [1, 1, 2, 4]),
    ],
)
async def test_what_may_pass_is_tried_again(
    hub: FakeHub, node: Node, pauses: list[float], troubles: list[Trouble], asked: list[float]
):
    hub.trouble(FILE, *troubles)
    assert (await node.fetch()).read_bytes() == WEIGHTS
    assert pauses == asked
    assert node.partials() == []


async def test_silence_ends_a_connection_and_not_the_download(hub: FakeHub, tmp_path: Path, pauses: list[float]):
    hub.trouble(FILE, Trouble(stall=1_000_000), Trouble(stall=0))
    node = Node(hub, tmp_path, NEURON_DOWNLOADS__STALL_SECS="0.1")
    assert (await node.fetch()).read_bytes() == WEIGHTS
    assert pauses == [1, 2]
    assert hub.ranges == [(FILE, "bytes=1000000-")] * 2


async def test_a_slow_body_may_take_longer_than_silence_may_last(hub: FakeHub, tmp_path: Path, pauses: list[float]):
    hub.trouble(FILE, Trouble(pace=0.15))
    node = Node(hub, tmp_path, NEURON_DOWNLOADS__STALL_SECS="1.2")
    assert (await node.fetch()).read_bytes() == WEIGHTS
    assert pauses == []


async def test_who_sends_nothing_is_named(hub: FakeHub, tmp_path: Path, pauses: list[float]):
    hub.trouble(FILE, *[Trouble(stall=0)] * 9)
    error = await Node(hub, tmp_path, NEURON_DOWNLOADS__STALL_SECS="0.1").refusal()
    assert error.kind == "repo_fetch_failed"
    assert f"could not be fetched from {hub.url}, which sent nothing for 0.1 s" in str(error)
    hub.trouble("list", Trouble(stall=0))
    error = await Node(hub, tmp_path, NEURON_DOWNLOADS__STALL_SECS="0.1").refusal()
    assert f"could not be fetched from {hub.url}, which sent nothing for 0.1 s" in str(error)


async def test_a_server_that_ignores_ranges_sends_it_all_again(hub: FakeHub, node: Node, pauses: list[float]):
    hub.trouble(FILE, Trouble(cut=2_000_000), Trouble(whole=True, cut=2_500_000), Trouble(whole=True))
    assert (await node.fetch()).read_bytes() == WEIGHTS
    assert hub.ranges == [(FILE, "bytes=2000000-"), (FILE, "bytes=2500000-")]
    assert node.reports[-1] == ("download", len(WEIGHTS), len(WEIGHTS))


async def test_a_body_that_always_ends_early_is_given_up_and_kept(hub: FakeHub, node: Node, pauses: list[float]):
    hub.trouble(FILE, *[Trouble(whole=True, cut=400_000)] * 9)
    error = await node.refusal()
    assert error.kind == "repo_fetch_failed"
    assert f"{hub.url}, which hung up after 400000 of 3072000 bytes" in str(error)
    assert pauses == [1, 2, 4, 8]
    (partial,) = node.partials()
    assert partial.read_bytes() == WEIGHTS[:400_000]
    hub.troubles.clear()
    assert (await node.fetch()).read_bytes() == WEIGHTS
    assert hub.ranges[-1] == (FILE, "bytes=400000-")


@pytest.mark.parametrize(
    ("failures", "error", "seconds"),
    [
        (1, WebError("", ""), 1),
        (4, WebError("", "", status=500), 8),
        (5, WebError("", "", status=500), None),
        (1, WebError("", "", status=404, passing=False), None),
        (4, WebError("", "", status=429, retry_after=60), 60),
        (1, WebError("", "", status=429, retry_after=61), None),
        (1, WebError("", "", status=429, retry_after=0), 1),
    ],
)
def test_pauses_grow_and_end(failures: int, error: WebError, seconds: int | None):
    assert pause(failures, error) == seconds


async def test_a_huge_file_is_asked_for_in_parts(hub: FakeHub, node: Node, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(transfer, "_MOST_AT_ONCE", 1_200_000)
    assert (await node.fetch()).read_bytes() == WEIGHTS
    assert [part for _, part in hub.ranges] == ["bytes=0-1199999", "bytes=1200000-2399999", "bytes=2400000-"]


async def test_a_hub_is_asked_by_way_of_the_proxy(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("http_proxy", hub.url)
    endpoint = {"NEURON_HARNESS__TORCH__SOURCES__HUGGINGFACE__ENDPOINT": "http://hub.invalid"}
    assert (await Node(hub, tmp_path, **endpoint).fetch()).read_bytes() == WEIGHTS


# --- what is final


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


@pytest.mark.parametrize(
    "name", ["../evil.gguf", "/etc/evil.gguf", "a//evil.gguf", "a/../evil.gguf", "e\nvil.gguf", "."]
)
async def test_a_file_name_is_never_a_way_out_of_the_cache(hub: FakeHub, node: Node, name: str):
    hub.repositories[NAME] = {name: WEIGHTS}
    assert (await node.refusal()).kind == "empty_repo"
    assert hub.downloads() == []


# --- taking up, sharing, giving up


async def test_a_cancelled_download_is_taken_up_later(hub: FakeHub, node: Node):
    hub.trouble(FILE, Trouble(stall=1_500_000))
    fetching = asyncio.create_task(node.fetch())
    await until(lambda: any(partial.stat().st_size == 1_500_000 for partial in node.partials()))
    fetching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await fetching
    hub.stop()  # which also ends the thread that reads
    again = FakeHub()
    again.repositories = hub.repositories
    again.start()
    try:
        node = Node(again, node.blobs.parents[1])
        assert (await node.fetch()).read_bytes() == WEIGHTS
    finally:
        again.stop()
    assert again.ranges == [(FILE, "bytes=1500000-")]
    assert ("download", len(WEIGHTS), len(WEIGHTS)) == node.reports[-1]


async def test_a_download_whose_process_was_killed_is_taken_up_by_who_waited(hub: FakeHub, node: Node):
    hub.trouble(FILE, Trouble(stall=1_500_000))
    script = f"""
import asyncio
from helexa.core.source import ModelSource
from helexa.neuron.config import read_config
from helexa.neuron.sources import Sources
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


async def test_a_file_that_is_taken_away_while_it_grows_is_not_mistaken_for_another(hub: FakeHub, node: Node):
    content = hub.answer

    def taking(path: str):
        for partial in node.partials() if "resolve" in path else ():
            partial.unlink()
            partial.write_bytes(b"half of what somebody else fetches")
        return content(path)

    hub.answer = taking
    error = await node.refusal()
    assert error.kind == "cache_failed"
    assert "a file was taken away while it was fetched" in str(error)
    hub.answer = content
    assert (await node.fetch()).read_bytes() == WEIGHTS


async def test_a_damaged_beginning_is_thrown_away(hub: FakeHub, node: Node):
    path = await node.fetch()
    blob = path.resolve()
    blob.rename(f"{blob}.helexa.incomplete")
    (partial,) = node.partials()
    partial.write_bytes(b"x" * 1_000_000)
    assert (await node.fetch()).read_bytes() == WEIGHTS
    assert hub.ranges == [(FILE, "bytes=1000000-")]
    assert hub.downloads() == [FILE] * 3
    assert node.partials() == []


async def test_a_finished_file_of_another_length_is_fetched_again(node: Node):
    path = await node.fetch()
    path.resolve().write_bytes(b"short")
    assert (await node.fetch()).read_bytes() == WEIGHTS


async def test_loads_at_the_same_time_share_one_download(hub: FakeHub, node: Node, tmp_path: Path):
    others = [Node(hub, tmp_path / "hub") for _ in range(2)]
    paths = await asyncio.gather(node.fetch(), *(other.fetch() for other in others))
    assert len(set(paths)) == 1
    assert paths[0].read_bytes() == WEIGHTS
    assert hub.downloads() == [FILE]


async def test_parts_come_in_side_by_side_but_not_all_at_once(hub: FakeHub, tmp_path: Path):
    running = most = 0
    lock = threading.Lock()
    both = threading.Event()
    usual = hub.answer

    def counting(path: str):
        nonlocal running, most
        if "safetensors" in path:
            with lock:
                running += 1
                most = max(most, running)
                if running == 3:
                    both.set()
            both.wait(10)
            with lock:
                running -= 1
        return usual(path)

    hub.answer = counting
    node = Node(hub, tmp_path, NEURON_DOWNLOADS__MAX_CONCURRENT="3")
    folder = await node.fetch("org/dense")
    assert most == 3
    assert len(list(folder.iterdir())) == 8


@pytest.mark.parametrize("text", ["0", "65", "many", "-1"])
def test_the_number_of_downloads_must_be_one(text: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HELEXA_MAX_CONCURRENT_DOWNLOADS", text)
    with pytest.raises(ConfigError, match=f"HELEXA_MAX_CONCURRENT_DOWNLOADS: '{text}' is not a number from 1 to 64"):
        Sources(read_config(None, {}))


async def test_the_first_failure_ends_the_others(hub: FakeHub, node: Node):
    hub.trouble("model-0.safetensors", Trouble(stall=10))
    hub.trouble("model-5.safetensors", Trouble(status=404))
    assert (await node.refusal("org/dense")).kind == "repo_refused"


async def test_the_tools_of_the_hub_understand_the_cache(hub: FakeHub, node: Node, tmp_path: Path):
    from huggingface_hub import scan_cache_dir

    folder = await node.fetch("org/dense")
    found = await asyncio.to_thread(scan_cache_dir, tmp_path / "hub")
    assert not found.warnings
    (repository,) = found.repos
    (revision,) = repository.revisions
    assert (repository.repo_id, revision.snapshot_path, revision.refs) == ("org/dense", folder, {"main"})
    assert {file.file_name for file in revision.files} == set(hub.repositories["org/dense"])


async def test_an_older_hub_that_tells_only_names_is_enough(hub: FakeHub, node: Node):
    listing = {"sha": "0" * 40, "siblings": [{"rfilename": FILE}]}
    hub.trouble("list", Trouble(body=json.dumps(listing).encode()))
    usual = hub.answer
    hub.answer = lambda path: (200, {}, WEIGHTS) if "resolve" in path else usual(path)
    assert (await node.fetch()).read_bytes() == WEIGHTS


async def test_whatever_goes_wrong_what_is_used_is_right(hub: FakeHub, tmp_path: Path, pauses: list[float]):
    rng = random.Random(7)
    files = hub.repositories["org/dense"]
    troubles = [
        *(Trouble(cut=40_000), Trouble(cut=0), Trouble(status=500), Trouble(status=429), Trouble(whole=True)),
        *(Trouble(status=404), Trouble(body=b"?" * 50_000)),
    ]
    kinds: set[str] = set()
    for number in range(15):
        node = Node(hub, tmp_path / str(number))
        for file in files:
            hub.trouble(file, *rng.choices(troubles, k=rng.choice([0, 0, 0, 1, 2])))
        tasks = [asyncio.create_task(node.fetch("org/dense")) for _ in range(3)]
        await until(lambda node=node: bool(node.reports))
        tasks[0].cancel()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(outcome, Path):
                assert {path.name: path.read_bytes() for path in outcome.iterdir()} == files
                kinds.add("whole")
            elif isinstance(outcome, SourceError):
                kinds.add(outcome.kind)
    assert {"whole"} < kinds <= {"whole", "repo_refused", "invalid_source"}


# --- disks


async def test_what_cannot_fit_is_refused_before_a_byte_is_fetched(
    hub: FakeHub, node: Node, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr(snapshots.Snapshots, "room", lambda self: 3_000_000)
    error = await node.refusal()
    assert error.kind == "disk_full"
    assert error.details["required_bytes"] == len(WEIGHTS)
    assert error.details["free_bytes"] == 3_000_000
    assert f"needs 3.1 MB, but 3.0 MB are free in {tmp_path / 'hub'}" in str(error)
    assert hub.downloads() == []


async def test_a_disk_that_is_full_is_said_so(hub: FakeHub, node: Node, tmp_path: Path):
    path = await node.fetch()
    blob = path.resolve()
    blob.unlink()
    Path(f"{blob}.helexa.incomplete").symlink_to("/dev/full")
    error = await node.refusal()
    assert error.kind == "disk_full"
    assert f"cannot be kept: {tmp_path / 'hub'} is full: make room, or name another cache folder" in str(error)
    assert not blob.exists()


async def test_a_cache_that_cannot_be_written_is_said_so(hub: FakeHub, tmp_path: Path):
    with pytest.raises(OSError) as refused:
        os.mkdir("/sys/helexa")  # noqa: PTH102
    assert refused.value.errno in (errno.EPERM, errno.EACCES, errno.EROFS)
    error = await Node(hub, Path("/sys/helexa")).refusal()
    assert error.kind == "cache_unwritable"
    assert "cannot be kept: /sys/helexa cannot be written" in str(error)


# --- without a hub


async def test_what_is_whole_loads_without_asking_when_offline(
    hub: FakeHub, node: Node, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    folder = await node.fetch("org/dense")
    hub.requests.clear()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert await node.fetch("org/dense") == folder
    error = await node.refusal()
    assert error.kind == "not_cached"
    assert f"HF_HUB_OFFLINE is set, and nothing of it is in {tmp_path / 'hub'}" in str(error)
    for number in (1, 4):
        (folder / f"model-{number}.safetensors").unlink()
    error = await node.refusal("org/dense")
    assert f"{tmp_path / 'hub'} lacks model-1.safetensors, model-4.safetensors" in str(error)
    assert hub.requests == []


@pytest.mark.parametrize("trouble", [Trouble(status=500), Trouble(status=404), Trouble(body=b"?"), Trouble(cut=3)])
async def test_a_hub_that_fails_does_not_matter_to_what_is_here(hub: FakeHub, node: Node, trouble: Trouble):
    path = await node.fetch()
    hub.trouble("list", trouble)
    assert await node.fetch() == path
    assert not hub.troubles["list"], "it was not asked"


async def test_a_busy_hub_is_asked_again_for_what_is_not_here(hub: FakeHub, node: Node, pauses: list[float]):
    hub.trouble("list", Trouble(status=503), Trouble(status=429, headers=(("Retry-After", "3"),)))
    assert (await node.fetch()).read_bytes() == WEIGHTS
    assert pauses == [1, 3]
    hub.repositories["org/other"] = {}
    hub.trouble("list", *[Trouble(status=503)] * 3)
    assert "answered HTTP 503" in str(await node.refusal("org/other"))


async def test_an_update_that_fails_leaves_what_was_here_in_use(hub: FakeHub, node: Node, pauses: list[float]):
    path = await node.fetch()
    hub.repositories[NAME] = {FILE: WEIGHTS[::-1]}
    hub.trouble(FILE, Trouble(status=404))
    assert await node.fetch() == path
    assert path.read_bytes() == WEIGHTS
    assert (await node.fetch()).read_bytes() == WEIGHTS[::-1]


async def test_a_hub_that_is_away_and_a_cache_that_lacks_something_are_both_told(hub: FakeHub, node: Node):
    folder = await node.fetch("org/dense")
    (folder / "model-3.safetensors").unlink()
    hub.stop()
    error = await node.refusal("org/dense")
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
def test_only_the_place_of_a_site_is_ever_shown(url: str, shown: str):
    with pytest.raises(WebError) as refused:
        Site(url, None, 1).get("/x")
    assert refused.value.where == shown
    assert "is no address that can be used" in str(refused.value)
    assert "secret" not in str(refused.value)


async def test_a_quantisation_of_an_older_commit_serves_without_a_hub(hub: FakeHub, node: Node):
    older = await node.fetch()
    hub.repositories[NAME] = {"tiny-Q4_0.gguf": WEIGHTS}
    newer = await node.fetch()
    hub.stop()
    assert await node.fetch() == newer
    newer.unlink()
    assert await node.fetch() == older
