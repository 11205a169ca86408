"""Forced calls of random tools with real tokenizers and speculative decoding, through a node and a gateway."""

from pathlib import Path

import pytest

from nightly import cases

TOOLS = 12  # two for each API, streamed and not streamed
MAX_TOKENS = 100


@pytest.fixture(autouse=True)
def attacks_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[3] / "perf" / "attack")


async def test_forced_tool_calls_of_a_random_model_are_valid_or_truncated(
    tmp_path: Path, qwen2_5_tokenizer: Path, llama3_2_tokenizer: Path, mistral_nemo_tokenizer: Path
) -> None:
    from forced_calls import attack, stack
    from support.random_tools import random_task, write_random_model

    tasks = [random_task(number, seed=1) for number in range(TOOLS)]
    async with stack() as running:
        for tokenizer in (qwen2_5_tokenizer, mistral_nemo_tokenizer, llama3_2_tokenizer)[: cases(1, 3)]:
            model = f"random/{tokenizer.name}"
            await running.load(model, write_random_model(tokenizer, tmp_path / tokenizer.name), "")
            counts = await attack(running, model, tasks, every_api=False, streams=4, max_tokens=MAX_TOKENS)
            assert counts["wrong"] == 0
            assert counts["valid"] > TOOLS / 2
            await running.unload(model)
