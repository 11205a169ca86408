"""Engine processes in an environment without torch."""

from pathlib import Path

import pytest

from helexa.core.errors import HelexaError
from helexa.neuron.engine.ipc.engine_options import EngineOptions
from helexa.neuron.engine.ipc.messages import Generate, SamplingParams
from helexa.neuron.engine.loading.load import load_once
from helexa.neuron.engine.scheduling.sequence import Sequence
from helexa.neuron.engine_client.client import EngineClient
from neuron.ranks.rank_models import MODELS
from reference.vision_language import generate
from tiny_models import tiny_model
from without_torch import without_torch

PROMPT = list(range(20, 90))
SAMPLINGS = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=0.8, top_k=40, top_p=0.9, min_p=0.01, seed=7, logprobs=3),
    SamplingParams(temperature=0.7, seed=3, repetition_penalty=1.2, presence_penalty=0.5, logit_bias={5: 2.0}),
]


def remove_torch(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Make child processes find no torch."""
    folder.mkdir()
    for name, value in without_torch(folder).items():
        patch.setenv(name, value)


def tokens_with_torch(model: Path) -> list[list[int]]:
    runner = load_once(model, EngineOptions(kv_cache_mb=8, snapshot_mb=8, threads=1))
    requests = [Generate(id=n, prompt=PROMPT, max_tokens=24, sampling=one) for n, one in enumerate(SAMPLINGS)]
    return generate(runner, [Sequence(request) for request in requests])


@pytest.mark.parametrize("ranks", [1, 2])
async def test_engine_without_torch_generates_the_same_tokens_as_with_torch(
    ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "model"
    tiny_model(model, seed=2, **MODELS["qwen3_5_moe"])
    expected = tokens_with_torch(model)
    remove_torch(tmp_path / "site", monkeypatch)
    options = EngineOptions(kv_cache_mb=8, snapshot_mb=8, threads=1, tensor_parallel=ranks)
    client = await EngineClient.start(model, options)
    try:
        for sampling, tokens in zip(SAMPLINGS, expected, strict=True):
            outputs = [output async for output in client.generate(PROMPT, max_tokens=24, sampling=sampling)]
            assert [token for output in outputs for token in output.tokens] == tokens
        embedding = await client.embed(PROMPT)
    finally:
        await client.close()
    assert (client.ready.kernels, client.ready.dtype) == ("native", "bfloat16")
    assert len(embedding.vector) == MODELS["qwen3_5_moe"]["hidden_size"]


@pytest.mark.parametrize(
    ("settings", "options", "reason"),
    [
        (
            {"head_dim": 16},
            {},
            r"\(heads of 16 .*\), and torch is not installed; install it with: .*helexa\[gpu\]",
        ),
        ({}, {"kernels": "torch"}, r"\(plain torch was requested\)"),
        ({}, {"dtype": "float32"}, r"\(float32 was requested\)"),
        ({}, {"device": "cuda:1"}, "device 'cuda:1' cannot be used: torch is not installed; install it with: "),
    ],
)
async def test_model_that_requires_torch_is_rejected_with_the_reason(
    settings: dict[str, int], options: dict[str, str], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "model"
    tiny_model(model, **MODELS["qwen2"] | settings)
    remove_torch(tmp_path / "site", monkeypatch)
    with pytest.raises(HelexaError, match=reason):
        await EngineClient.start(model, EngineOptions(kv_cache_mb=8, threads=1, **options))


async def test_engine_uses_torch_for_a_model_that_native_kernels_do_not_support(tmp_path: Path) -> None:
    tiny_model(tmp_path, **MODELS["qwen2"] | {"head_dim": 16})
    client = await EngineClient.start(tmp_path, EngineOptions(kv_cache_mb=8, threads=1))
    try:
        outputs = [o async for o in client.generate(PROMPT, max_tokens=4, sampling=SAMPLINGS[0])]
    finally:
        await client.close()
    assert client.ready.kernels != "native"
    assert outputs[-1].error is None
    assert sum(len(output.tokens) for output in outputs) == 4
