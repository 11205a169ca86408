"""The models on a node's disks: their ids, sizes, estimates and problems, and changes of the folders."""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from helexa.core.errors import ApiError, SourceError
from helexa.core.model_source_ids import ModelSource
from helexa.core.node_reports import LocalModel, PullRequest
from helexa.neuron.config import NeuronConfig, SourceConfig
from helexa.neuron.lifecycle.inspection import describe, inspect, template_abilities
from helexa.neuron.lifecycle.local_inventory import LocalInventory
from helexa.neuron.lifecycle.pulls import MAX_RUNNING, Pulls
from helexa.neuron.sources.hubs_and_sources import Sources
from helexa.neuron.sources.local_models import MAX_DEPTH, FolderScan
from helexa.neuron.text.settings_and_sampling_defaults import TemplateSources
from neuron.fake_hub import FakeHub

COMMIT = "0" * 40


@pytest.fixture
def config(tmp_path: Path) -> NeuronConfig:
    """A node with empty caches and one model folder."""
    (tmp_path / "models").mkdir()
    sections = {
        "cache": {"dir": tmp_path / "cache"},
        "models_dirs": [tmp_path / "models"],
        "harness": {"torch": {"hf_cache": tmp_path / "hub"}},
    }
    return NeuronConfig.model_validate(sections)


def store(config: NeuronConfig, repository: str, *files: Path | str) -> None:
    """Put files into the Hugging Face Hub's cache. A name without a path is an empty file."""
    cache = config.harness.torch.hf_cache
    assert cache is not None
    folder = cache / f"models--{repository.replace('/', '--')}" / "snapshots" / COMMIT
    folder.mkdir(parents=True, exist_ok=True)
    for file in files:
        if isinstance(file, Path):
            (folder / file.name).symlink_to(file)
        else:
            (folder / file).touch()


@asynccontextmanager
async def watching(config: NeuronConfig) -> AsyncIterator[LocalInventory]:
    inventory = LocalInventory(config)
    task = asyncio.create_task(inventory.run())
    try:
        yield inventory
    finally:
        task.cancel()
        await asyncio.wait([task])


async def models(inventory: LocalInventory) -> dict[str, LocalModel]:
    return {model.id: model for model in (await inventory.current()).models}


async def until(inventory: LocalInventory, condition: Callable[[dict[str, LocalModel]], bool]) -> dict[str, LocalModel]:
    async with asyncio.timeout(60):
        while True:
            found = await models(inventory)
            if condition(found):
                return found
            await asyncio.sleep(0.02)


async def test_local_models_are_listed_with_memory_estimated_from_headers_and_problems(
    config: NeuronConfig, smollm2_gguf: Path
) -> None:
    (folder,) = config.models_dirs
    (folder / "pub").mkdir()
    (folder / "pub" / "tiny.gguf").symlink_to(smollm2_gguf)
    (folder / "broken.gguf").write_bytes(b"no model")
    os.mkfifo(folder / "pipe.gguf")
    (folder / "line\nbreak.gguf").touch()
    (folder / "mmproj-tower.gguf").touch()
    (folder / "model.mmproj-Q8_0.gguf").touch()
    (folder / "mtp-model.gguf").touch()
    (folder / "pub" / "MTP").mkdir()
    (folder / "pub" / "MTP" / "tiny-Q8_0-MTP.gguf").touch()
    (folder / "pub" / "tiny-imatrix.gguf").touch()
    store(config, "org/name", smollm2_gguf)
    async with watching(config) as inventory:
        found = await until(inventory, lambda found: all(one.memory_mb or one.problem for one in found.values()))
    size = smollm2_gguf.stat().st_size
    assert set(found) == {"org/name", "pub/tiny", "broken", "pipe"}
    assert found["org/name"].source == "huggingface:org/name"
    assert "org/name:Q4_1" in found["org/name"].names
    assert (found["pub/tiny"].source, found["pub/tiny"].size_bytes) == (f"file:{folder}/pub/tiny.gguf", size)
    assert 190 < (found["pub/tiny"].memory_mb or 0) < 230  # the engine requests 213 MiB with two threads
    assert found["pub/tiny"].context == 8192
    assert (found["pub/tiny"].architecture, found["pub/tiny"].parameters) == ("llama", 134_515_008)
    assert (found["pub/tiny"].capabilities, found["pub/tiny"].tool_call) == (["text"], False)
    assert found["pub/tiny"].modified == int(smollm2_gguf.stat().st_mtime)
    assert "not a GGUF file" in (found["broken"].problem or "")
    assert "not a regular file" in (found["pipe"].problem or "")


@pytest.mark.parametrize(
    ("default", "tool_use", "abilities"),
    [
        (None, None, (False, False)),
        ("{{ messages }}", None, (False, False)),
        ("{% if tools %}{{ tools }}{% endif %}", None, (True, False)),
        ("{{ messages }}", "{{ tools }}", (True, False)),
        ("{% if enable_thinking is defined %}<think>{% endif %}", None, (False, True)),
        ("{% if tools", "{" * 100_000, (False, False)),
    ],
)
def test_tool_and_reasoning_support_of_an_unloaded_model_follow_from_its_templates(
    default: str | None, tool_use: str | None, abilities: tuple[bool, bool]
) -> None:
    assert template_abilities(TemplateSources(default, tool_use)) == abilities


async def test_list_of_local_models_follows_changes_of_the_folders(config: NeuronConfig, smollm2_gguf: Path) -> None:
    (folder,) = config.models_dirs
    async with watching(config) as inventory:
        first = await inventory.current()
        (folder / "new.gguf").symlink_to(smollm2_gguf)
        store(config, "org/new", smollm2_gguf)
        inventory.changed()
        await until(inventory, lambda found: set(found) == {"new", "org/new"})
        assert inventory.revision != first.revision
        (folder / "new.gguf").unlink()
        inventory.changed()
        await until(inventory, lambda found: set(found) == {"org/new"})


async def test_further_quantizations_of_a_local_model_have_ids_with_their_tag(config: NeuronConfig) -> None:
    store(config, "org/both", "m.Q4_K_M.gguf", "m.Q8_0.gguf")
    store(config, "org/dense", "config.json", "tokenizer.json", "model.safetensors", "m.Q8_0.gguf")
    inventory = LocalInventory(config)
    found = await models(inventory)
    assert {model.id: model.source for model in found.values()} == {
        "org/both": "huggingface:org/both",
        "org/both:Q8_0": "huggingface:org/both:Q8_0",
        "org/dense": "huggingface:org/dense",
        "org/dense:Q8_0": "huggingface:org/dense:Q8_0",
    }


async def test_missing_model_folder_is_reported_and_does_not_hide_other_models(
    config: NeuronConfig, tmp_path: Path
) -> None:
    config.models_dirs.append(tmp_path / "missing")
    (config.models_dirs[0] / "a.gguf").touch()
    report = await LocalInventory(config).current()
    assert [model.id for model in report.models] == ["a"]
    assert report.problems == [f"{tmp_path / 'missing'}: No such file or directory"]


def test_scan_for_local_models_ends_at_the_limits_on_depth_and_entries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path.joinpath(*"abcdef"[: MAX_DEPTH - 1])
    deep.mkdir(parents=True)
    (deep / "found.gguf").touch()
    (deep / "deeper").mkdir()
    (deep / "deeper" / "hidden.gguf").touch()
    (tmp_path / "loop").symlink_to(tmp_path)
    scan = FolderScan()
    scan.add(tmp_path)
    assert [model.name for model in scan.models] == ["a/b/c/found"]
    assert scan.complete
    monkeypatch.setattr("helexa.neuron.sources.local_models.MAX_ENTRIES", 3)
    scan = FolderScan()
    scan.add(tmp_path)
    assert not scan.complete


def test_split_gguf_model_is_listed_once_with_the_size_of_all_parts(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        (tmp_path / f"big-{number:05}-of-00003.gguf").write_bytes(b"x" * number)
    (tmp_path / "orphan-00002-of-00003.gguf").write_bytes(b"x")
    scan = FolderScan()
    scan.add(tmp_path)
    (model,) = scan.models
    assert (model.name, model.size, model.path.name) == ("big", 6, "big-00001-of-00003.gguf")


def test_local_model_of_an_unsupported_architecture_is_listed_with_this_problem(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mamba9"}')
    assert "unsupported architecture 'mamba9'" in inspect(tmp_path, 512, 64).problem


async def test_finished_download_is_reported_and_a_third_concurrent_one_is_rejected(
    config: NeuronConfig, tmp_path: Path
) -> None:
    hub = FakeHub()
    hub.repositories["org/tiny"] = {"tiny.Q4_0.gguf": b"weights"}
    hub.start()
    try:
        config.harness.torch.sources = {"huggingface": SourceConfig(endpoint=hub.url)}
        ended = asyncio.Event()
        pulls = Pulls(config, Sources(config), ended.set)
        pull = pulls.start(PullRequest(model="org/tiny"))
        assert pulls.start(PullRequest(model="org/tiny")) is pull
        async with asyncio.timeout(60):
            await ended.wait()
        assert pull.status == "done"
        assert list((tmp_path / "hub").glob("models--org--tiny/snapshots/*/tiny.Q4_0.gguf"))
        for number in range(MAX_RUNNING):
            pulls.start(PullRequest(model=f"org/other{number}"))
        with pytest.raises(ApiError, match="already running"):
            pulls.start(PullRequest(model="org/third"))
        canceled = pulls.cancel("org/other0")
        assert canceled is not None
        assert canceled.status == "canceled"
        assert pulls.cancel("org/other0") is None
        pulls.start(PullRequest(model="org/third"))
        await pulls.close()
        assert {pull.model: pull.status for pull in pulls.all()}["org/third"] == "canceled"
    finally:
        hub.stop()


async def test_download_is_rejected_with_403_if_the_configuration_forbids_downloads_on_request(
    config: NeuronConfig,
) -> None:
    config.downloads.on_request = False
    pulls = Pulls(config, Sources(config))
    with pytest.raises(ApiError, match="on_request") as refused:
        pulls.start(PullRequest(model="org/tiny"))
    assert refused.value.status == 403
    assert (await LocalInventory(config).current()).downloads is False


async def test_memory_of_a_model_on_a_hub_is_estimated_from_the_sizes_of_its_files(
    config: NeuronConfig, smollm2_gguf: Path
) -> None:
    hub = FakeHub()
    hub.repositories["org/dense"] = {"config.json": b"{}", "tokenizer.json": b"{}", "m.safetensors": bytes(32 << 20)}
    hub.start()
    try:
        config.harness.torch.sources = {"huggingface": SourceConfig(endpoint=hub.url)}
        inventory = LocalInventory(config)
        plain = await inventory.estimate_mb(ModelSource.parse("org/dense"), None)
        quantized = await inventory.estimate_mb(ModelSource.parse("org/dense"), "q4k")
        assert plain is not None
        assert quantized is not None
        assert 300 + 32 < plain < 300 + 40
        assert 300 + 8 < quantized < 300 + 14
        assert not hub.downloads()
        on_disk = await inventory.estimate_mb(ModelSource.parse(str(smollm2_gguf)), None)
        assert on_disk is not None
        assert 190 < on_disk < 230
    finally:
        hub.stop()


async def test_load_of_a_model_on_the_disk_does_not_download_it(config: NeuronConfig, smollm2_gguf: Path) -> None:
    hub = FakeHub()
    hub.repositories["org/gone"] = {"m.Q4_0.gguf": b"weights"}
    hub.start()
    try:
        config.harness.torch.sources = {"huggingface": SourceConfig(endpoint=hub.url)}
        sources = Sources(config)
        store(config, "org/here", smollm2_gguf)
        path = await _on_disk(sources, "org/here")
        assert path.name == smollm2_gguf.name
        for name in ("org/gone", "pypi:llm-nothing"):
            with pytest.raises(SourceError, match="is no longer on the disk") as error:
                await _on_disk(sources, name)
            assert error.value.kind == "not_cached"
        assert not hub.requests
    finally:
        hub.stop()


async def _on_disk(sources: Sources, name: str) -> Path:
    source = ModelSource.parse(name)
    return await sources.resolve(source, quant=None, progress=lambda *_: None, download=False)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
CHUNKS = {"original_max_position_embeddings": 262_144}


@pytest.mark.parametrize(
    ("extra", "context"),
    [
        ({}, 32768),
        ({"rope_scaling": YARN}, 131_072),
        ({"max_position_embeddings": 1_010_000, "dual_chunk_attention_config": CHUNKS}, 262_144),
        ({"model_type": "unheard_of", "hidden_size": None}, 32768),
        ({"max_position_embeddings": None}, None),
    ],
)
def test_reported_context_length_of_a_local_model_is_that_of_the_engine(
    tmp_path: Path, extra: dict[str, Any], context: int | None
) -> None:
    config: dict[str, Any] = {"model_type": "qwen2", "hidden_size": 64, "num_hidden_layers": 1}
    config |= {"num_attention_heads": 2, "max_position_embeddings": 32768} | extra
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert describe(tmp_path).context_length == context
