"""Admission control with a real engine whose KV cache is too small for all requests at once."""

import asyncio
from contextlib import aclosing
from pathlib import Path

from helexa.core.node_reports import ModelSpec
from helexa.core.wire.request import GenerationRequest
from helexa.neuron.config import AdmissionConfig, TorchConfig
from helexa.neuron.engine_client.client import EngineClient
from helexa.neuron.lifecycle.served_model_and_context_limit import ServedModel
from helexa.neuron.output_events import Finished, TextDelta
from helexa.neuron.requests.inference import run
from helexa.neuron.text.model_text import ModelText
from neuron.fake_models import until

PROMPT = [504, 3575, 282, 4649, 314] * 12  # 61 tokens: one page, and a second page for the output
REQUEST = GenerationRequest(model="m", temperature=0, max_tokens=8)


async def test_requests_that_wait_for_memory_return_the_same_text_as_alone(smollm2_gguf: Path) -> None:
    config = TorchConfig(kv_cache_mb=8, max_sequences=8, admission=AdmissionConfig(max_wait_secs=600))
    engine = await EngineClient.start(smollm2_gguf, config.engine_options("cpu"))
    model = ServedModel("m", ModelSpec(model_id="m"), ModelText.open(smollm2_gguf), engine, config)
    most = 0

    async def complete(number: int, principal: str, leave_early: bool = False) -> str:
        nonlocal most
        text = ""
        async with aclosing(run(model, [[1000 + number, *PROMPT]], REQUEST, principal=principal)) as events:
            async for event in events:
                most = max(most, model.load().in_flight)
                text += event.text if isinstance(event, TextDelta) else ""
                if leave_early and text:
                    break
                if isinstance(event, Finished):
                    assert event.completion_tokens <= 8
        return text

    try:
        pages = engine.ready.kv_pages
        assert 2 * 2 <= pages < 8 * 2, "memory for some requests, but not for all"
        expected = [await complete(number, "a") for number in range(2)]
        together = await asyncio.gather(
            *(complete(n % 2, "ab"[n % 2]) for n in range(8)),
            *(complete(50 + n, "", leave_early=True) for n in range(2)),
        )
        assert list(together[:8]) == expected * 4
        assert 1 < most <= pages
        load = model.load()
        assert (load.in_flight, load.queue_depth) == (0, 0)
        await until(lambda: model.load().kv_available_mb == model.load().kv_budget_mb > 0)
    finally:
        await model.close()
