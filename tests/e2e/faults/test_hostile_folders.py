"""Hostile model folders: the node answers each load, serves other models, and stays within its limits."""

import json
import shutil
from pathlib import Path

import pytest

from faults.hostile_folders import MARKER, PLANTED, TEXT_FILES, hostile_folders, write_text_files
from faults.hostile_run import MEMORY_LIMIT_MB, HostileRun
from helexa.neuron.text import template_sandbox_process, tokenizer_process
from neuron.fake_models import make_model
from neuron.running_node import running
from nightly import cases
from tiny_models import tiny_model

FOLDERS = 200
_RUNTIME_MB = 400
"""Memory of a process without a model: Python, torch and its thread pools, or the vocabulary of a large model."""


@pytest.fixture
def hostile_base(tmp_path: Path) -> Path:
    """A folder for the fake engine, with the files that mutations change but without real weights."""
    base = make_model(tmp_path, "base")
    write_text_files(base)
    (base / "generation_config.json").write_text("{}")
    (base / "model.safetensors").write_bytes(bytes(64))
    return base


async def test_node_stays_usable_and_answers_each_load_of_a_hostile_model_folder(
    hostile_base: Path, tmp_path: Path
) -> None:
    target = tmp_path / "hostile"
    target.mkdir()
    async with running({}) as node:
        assert (await node.load(hostile_base, "org/good"))[0] == 200
        for folder in hostile_folders(hostile_base, target, cases(5, 40)):
            source = {"model_id": "org/hostile", "source": f"file:{folder}"}
            status, answer = await node.post("/models/load", source)
            assert status in (200, 400, 422), answer
            if status == 200:
                tokens, _ = await node.post("/tokenize", {"model": "org/hostile", "prompt": "aaaaaaaaaaaa"})
                assert tokens in (200, 422)
                assert (await node.post("/models/unload", {"model_id": "org/hostile"}))[0] == 200
            good = await node.post("/tokenize", {"model": "org/good", "prompt": "hi"})
            assert (good[0], good[1]["count"]) == (200, 2)
    assert not (target / MARKER).exists()


@pytest.mark.nightly
@pytest.mark.timeout(7200)
def test_loads_of_hostile_model_folders_stay_within_memory_and_time_limits(tmp_path: Path) -> None:
    base, target = tmp_path / "base", tmp_path / "hostile"
    model = tiny_model(
        tmp_path / "shards",
        model_type="llama",
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16384,
    )
    model.save_pretrained(base)  # in one file
    write_text_files(base)
    assert all((base / name).exists() for name in TEXT_FILES)
    target.mkdir()
    for name in PLANTED:  # the node's working directory
        (target / f"{name}.py").write_text(f"open({str(target / MARKER)!r}, 'w').close()\n")
    with HostileRun(base, target) as run:
        for folder in hostile_folders(base, target, cases(FOLDERS, FOLDERS, "HELEXA_HOSTILE_FOLDERS")):
            run.attack(folder)
            shutil.rmtree(folder)
        observed = run.observed
        slowest = sorted(observed.slowest.items(), key=lambda entry: -entry[1])[:10]
        print(json.dumps({"slowest": dict(slowest)} | {"statuses": {str(k): v for k, v in observed.statuses.items()}}))
        print(observed.good, observed.memory_mb, observed.total_mb)
        print(observed.health_secs, observed.working_secs, observed.worst)
    assert not (target / MARKER).exists()
    assert all(status in (200, 400, 404, 422, 503) for _, status in observed.statuses), observed.statuses
    assert set(observed.good) == {200}
    assert not observed.broken_lines
    limits_mb = {
        "server": _RUNTIME_MB,
        "text": (tokenizer_process.MAX_MEMORY >> 20) + _RUNTIME_MB,
        "template": (template_sandbox_process.MAX_MEMORY >> 20) + _RUNTIME_MB,
        "grammar": _RUNTIME_MB,
        "engine": MEMORY_LIMIT_MB + _RUNTIME_MB,
    }
    beyond = {kind: size for kind, size in observed.memory_mb.items() if size > limits_mb[kind]}
    assert not beyond, observed.memory_mb
    assert observed.working_secs <= 0.5, (observed.working_secs, observed.worst, observed.health_secs)
