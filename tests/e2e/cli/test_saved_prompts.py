"""Prompts that `helexa generate` saves to disk, and `helexa cache`, which lists and deletes them."""

import json

import pytest

from helexa.neuron.cache_folder import cache_root
from helexa.neuron.ops.native.kernel_library import native_kernels

PROMPT = "Which of these words is a color? " + "red stone river lamp " * 60


@pytest.fixture
def environ(environ, tmp_path):
    native_kernels()  # compiles the kernels, unless they are in the cache
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache/kernels").symlink_to(cache_root(None) / "kernels")
    return environ | {
        "HELEXA_BASE_URL": "private",
        "HELEXA_CACHE": str(tmp_path / "cache"),
        "HELEXA_PROMPTS_MB": "100",
    }


def test_second_helexa_generate_reads_the_prefix_cache_of_the_first_from_disk(helexa, smollm2_gguf):
    generate = ("generate", "-m", str(smollm2_gguf), PROMPT, "--stats", "--max-tokens", "2", "--temperature", "0")
    first, second = helexa(*generate), helexa(*generate)
    assert first.returncode == second.returncode == 0
    assert "from the cache" not in first.stderr and "from the cache" in second.stderr
    assert first.stdout == second.stdout
    (entry, weights) = sorted(json.loads(helexa("cache", "--json").stdout), key=lambda entry: entry["kind"])
    assert weights["kind"] == "weights" and weights["model"] == smollm2_gguf.stem
    assert entry["model"] == smollm2_gguf.stem and entry["size_bytes"] > 1 << 20
    assert smollm2_gguf.stem in helexa("cache").stdout
    assert "deleted 0 bytes" in helexa("cache", "--clear", "other").stderr
    assert helexa("cache", smollm2_gguf.stem).stdout
    assert "deleted" in helexa("cache", "--clear", str(smollm2_gguf)).stderr
    assert "nothing is saved" in helexa("cache").stderr
    assert "from the cache" not in helexa(*generate).stderr
