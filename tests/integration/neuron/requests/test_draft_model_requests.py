"""Requests to a node with a real engine and a draft model."""

from pathlib import Path
from typing import Any

import pytest
from draft_models import DRAFT, TEXT, related_model

from neuron.running_node import Node, running

OPTIONS = {"KV_CACHE_MB": "16", "THREADS": "1", "STEP_TIMING": "fixed", "PREFIX_REUSE": "off"}


async def load(node: Node, **settings: Any) -> tuple[int, Any]:
    return await node.post("/models/load", {"model_id": "org/tiny", **settings})


async def complete(node: Node) -> str:
    body = {"model": "org/tiny", "prompt": "the red fox", "max_tokens": 200, "temperature": 0.8, "seed": 3}
    status, answer = await node.post("/v1/completions", body)
    assert status == 200, answer
    return answer["choices"][0]["text"]


@pytest.mark.asyncio
async def test_draft_model_named_in_a_load_request_is_used_and_reported(tmp_path: Path) -> None:
    related_model(tmp_path / "model", strength=4.0, model_type="llama", **TEXT)
    related_model(tmp_path / "draft", strength=4.0, seed=1, **DRAFT)
    related_model(tmp_path / "other", model_type="gpt2", vocab_size=320, n_embd=32, n_layer=1, n_head=2)
    (tmp_path / "other" / "tokenizer.json").unlink()
    model, draft = f"file:{tmp_path}/model", f"file:{tmp_path}/draft"
    async with running({f"NEURON_HARNESS__TORCH__{name}": value for name, value in OPTIONS.items()}, None) as node:
        status, error = await load(node, source=model, draft_model=f"file:{tmp_path}/other")
        assert status == 400, error
        _, alone = await node.post("/models/estimate", {"model_id": "org/tiny", "source": model})
        spec = {"model_id": "org/tiny", "source": model, "draft_model": draft}
        _, together = await node.post("/models/estimate", spec)
        assert together["memory_mb"] > alone["memory_mb"] > 0
        assert await load(node, source=model) == (200, {"status": "loaded"})
        plain = await complete(node)
        await node.post("/models/unload", {"model_id": "org/tiny"})
        assert await load(node, source=model, draft_model=draft) == (200, {"status": "loaded"})
        assert await complete(node) == plain
        _, health = await node.get("/health")
        (load_report,) = health["models"]
        drafted, accepted = load_report["model_drafts_total"], load_report["accepted_model_drafts_total"]
        assert drafted >= accepted > 20
        assert load_report["draft_gain"] > 1
        _, metrics = await node.read("/metrics")
    assert f'neuron_model_drafts_total{{model="org/tiny",result="accepted",source="model"}} {accepted}.0' in metrics
    assert 'neuron_model_draft_gain{model="org/tiny"}' in metrics
