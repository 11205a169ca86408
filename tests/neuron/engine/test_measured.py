"""Memory of an accelerator as it is seen to be taken, told by a card that only counts."""

from pathlib import Path

import pytest
import torch
from tabled_ops import TabledOps

from helexa.core.errors import DoesNotFitError
from helexa.neuron.engine.execution.runner import Runner
from helexa.neuron.engine.ipc.messages import EngineOptions
from helexa.neuron.engine.loading import device
from helexa.neuron.engine.loading.fit import alone
from helexa.neuron.engine.loading.load import load_once
from helexa.neuron.engine.loading.memory_measurement import largest, measured, measured_on_device
from helexa.neuron.ops.choice import Choice
from helexa.neuron.ops.constants import PAGE_SIZE
from neuron.needing import MIB, needs
from tiny_models import tiny_model


class Card:
    """A card of 8000 MiB on which 1200 are allocated, of which 1000 are weights."""

    def __init__(self, free_mb: int = 8000) -> None:
        self.allocated = self.peak = 1200 * MIB
        self.cached = 50 * MIB
        self._size = free_mb * MIB

    def use(self, *sizes_mb: int) -> None:
        """Take so much and give it back, one time after the other."""
        self.peak = max(self.peak, *(self.allocated + size * MIB for size in sizes_mb))
        self.cached = self.peak - self.allocated

    def empty_cache(self) -> None:
        self.cached = 0

    def reset_peak_memory_stats(self) -> None:
        self.peak = self.allocated

    def synchronize(self) -> None: ...

    def memory_allocated(self) -> int:
        return self.allocated

    def max_memory_allocated(self) -> int:
        return self.peak

    def memory_reserved(self) -> int:
        return self.allocated + self.cached

    def mem_get_info(self) -> tuple[int, int]:
        return self._size - self.memory_reserved(), self._size


def test_needs_follow_what_was_seen_and_what_is_left_goes_to_the_cache() -> None:
    card = Card()
    card.use(3000)  # while it loaded
    guessed = needs(weights=900 * MIB, step=700 * MIB, share=0.8, pages=100_000, page_step=7, position_step=7)
    found = measured(guessed, 1000 * MIB, lambda: card.use(200, 300), graphs=False, cuda=card)
    assert (found.weights, found.loading) == (1000 * MIB, 0)
    assert found.step == int(300 * 1.1 * MIB)
    assert found.free == 8000 * MIB, "what it holds itself is free for it"
    assert (found.page_step, found.position_step) == (0, 0)
    recorded = measured(guessed, 1000 * MIB, lambda: card.use(300), graphs=True, cuda=card)
    assert recorded.step == 2 * found.step
    assert alone(found).pages > alone(recorded).pages > alone(guessed).pages // 2
    with pytest.raises(DoesNotFitError) as refused:
        alone(measured(guessed, 1000 * MIB, lambda: card.use(8000), graphs=False, cuda=card))
    assert refused.value.details["activations_mb"] == 8800


def test_a_runner_measures_the_largest_steps_and_then_has_the_cache_that_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "max_position_embeddings": 256}
    tiny_model(tmp_path, model_type="llama", vocab_size=64, num_attention_heads=2, num_key_value_heads=2, **shape)
    monkeypatch.setattr(
        device, "choose", lambda *a, **k: Choice(TabledOps(torch.device("cpu"), torch.float32), "small")
    )
    options = EngineOptions(dtype="float32", kv_cache_mb=1, max_sequences=5, max_step_tokens=100)
    runner = load_once(tmp_path, options)
    card = Card()
    for name in ("empty_cache", "reset_peak_memory_stats", "synchronize", "mem_get_info", "memory_reserved"):
        monkeypatch.setattr(torch.cuda, name, getattr(card, name))
    for name in ("memory_allocated", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, getattr(card, name))
    monkeypatch.setattr(runner.ops, "parts_bytes", lambda *sizes: 1000)  # which short contexts do not show
    steps: list[None] = []
    needed = needs(page=runner.facts.token_bytes * PAGE_SIZE, context=256)
    found = measured_on_device(runner._model, runner.ops, options, needed, 5, lambda: steps.append(None))
    assert len(steps) == len(largest(100, 5)), "whoever waits hears of each"
    assert (found.weights, found.free) == (card.allocated, 8000 * MIB)
    assert found.step == 2 * 1000, "once for recorded steps, once for others"
    runner = Runner(runner._model, runner.ops, options, found, alone(found))
    short, prompt, tokens = largest(100, 5)
    assert [len(runner.run(step).tokens) for step in (short, prompt, tokens)] == [1, 1, 5]
    assert [len(step.tokens) for step in (short, prompt)] == [32, 100]


def test_tokens_are_chosen_in_all_ways_that_have_kernels_of_their_own() -> None:
    ways = [step.sampling for step in largest(2048, 2) if step.sampling is not None]
    assert {(way.temperature[0] > 0, way.top_p[0] < 1) for way in ways} == {(False, False), (True, False), (True, True)}
