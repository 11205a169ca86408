"""A sequence has the same output in any schedule as alone, for each kind of model and for two sets of kernels."""

import json
import random
from collections import Counter
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from schedule_fuzz import SEQUENCES, Subject, count_differences, random_cases

from helexa.neuron.engine.grammar_matcher import read_vocabulary
from helexa.neuron.engine.ipc.engine_options import EngineOptions
from helexa.neuron.engine.loading.load import load_once
from helexa.neuron.ops.native.native_ops import NativeOps
from neuron.vision_model import write_tokenizer
from nightly import cases, daily
from reference.vision_language import IMAGE_TOKEN, VisionLanguageModel, picture
from tiny_models import tiny_model

SETS = cases(1, 40, "HELEXA_TEST_EQUAL_OUTPUTS")
PER_SET = 12
CACHE_MB = 16
VOCABULARY = 320
_TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 257,
}
MODELS: dict[str, dict[str, Any]] = {
    "dense": {"model_type": "llama"},
    "sliding": {
        "model_type": "gemma2",
        "sliding_window": 24,
        "attn_logit_softcapping": 1.0,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "windowed": {"model_type": "mistral", "sliding_window": 24},
    "shared keys": {
        "model_type": "gemma4_text",
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "global_head_dim": 64,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": _TEXT["vocab_size"],
    },
    "hybrid": {
        "model_type": "qwen3_5_text",
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    },
    "latent": {
        "model_type": "deepseek_v3",
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 32,
        "n_group": 4,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "topk_group": 2,
        "kv_lora_rank": 64,
        "q_lora_rank": None,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 32,
        "v_head_dim": 32,
    },
    "norms of all heads": {
        "model_type": "olmo3",
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "scaled queries": {
        "model_type": "ministral3",
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 16,
            "llama_4_scaling_beta": 0.4,
        },
    },
    "mixture": {
        "model_type": "qwen3_moe",
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
    },
    "qwen3_5 images": {},
    "gemma3 images": {},
}


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def load(folder: Path, kind: str, kernels: str) -> Subject:
    """Create and load a model with random weights.

    Args:
        kernels: `reference` for torch in float32, `native` for the C kernels.
    """
    settings: dict[str, Any] = {"dtype": "float32", "kernels": "torch"} if kernels == "reference" else {}
    settings |= {"kv_cache_mb": CACHE_MB, "snapshot_mb": 8, "max_sequences": SEQUENCES, "threads": 1}
    settings["speculation_max_sequences"] = SEQUENCES
    if kind.endswith(" images"):
        defaults = {"dtype": "auto", "kernels": "auto"}
        model = VisionLanguageModel(folder, kind.removesuffix(" images"), **defaults | settings)
        runner, images = model.runner, [model.prepared(picture(96 + 32 * n, 96, n)) for n in range(3)]
    else:
        tiny_model(folder, **_TEXT | MODELS[kind])
        runner, images = load_once(folder, EngineOptions(**settings)), []
    if kernels == "native" and runner.ops.name != NativeOps.name:
        pytest.skip("no C compiler on this machine")
    write_tokenizer(folder)
    end = {"eos_token_id": _TEXT["eos_token_id"]}  # Gemma's default is a letter of this vocabulary
    (folder / "generation_config.json").write_text(json.dumps(end))
    return Subject(runner, read_vocabulary(folder, VOCABULARY), images, IMAGE_TOKEN, exact=kernels == "native")


MIXED_LAYERS = ("sliding", "shared keys", "norms of all heads", "gemma3 images")
DAILY = [kind for kind in MODELS if kind != "scaled queries"]


@pytest.mark.parametrize(
    ("kind", "kernels"),
    daily(
        [
            ("dense", "reference"),
            ("hybrid", "reference"),
            *((kind, "native") for kind in MODELS if kind != "scaled queries"),
        ],
        product(MODELS, ("reference", "native")),
        several=True,
    ),
)
def test_output_in_a_random_schedule_equals_the_output_of_a_separate_run(
    kind: str, kernels: str, tmp_path: Path
) -> None:
    subject = load(tmp_path, kind, kernels)
    releases_pages = kernels == "native" and kind in {"windowed", *MIXED_LAYERS}
    assert subject.runner.facts.window == (24 if releases_pages else None)
    has_window_pages = releases_pages and kind in MIXED_LAYERS
    facts = subject.runner.facts
    assert bool(facts.window_pages) == has_window_pages
    assert facts.kv_bytes <= CACHE_MB << 20
    assert (facts.kv_pages * facts.token_bytes * 64 > CACHE_MB << 20) == has_window_pages, (
        "more pages than of all layers"
    )
    counts: Counter[str] = Counter()
    for seed in range(SETS):
        chance = random.Random(seed)
        found = count_differences(subject, random_cases(chance, subject, PER_SET), chance)
        assert not found["different"], f"seed {seed}: {found}"
        counts += found
    subject.runner.close()
    assert counts["compared"] == 2 * PER_SET * SETS
    assert counts["cached"] or SETS < 5
