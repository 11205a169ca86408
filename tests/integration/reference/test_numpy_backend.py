"""Engines with numpy arrays compute the same bytes as engines with torch tensors: every architecture, with images."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scheduler_runs import GREEDY, scheduler_of

from helexa.neuron import tensors
from helexa.neuron.engine.execution.step_builder_and_penalties import build_step
from helexa.neuron.engine.ipc.engine_options import EngineOptions
from helexa.neuron.engine.ipc.messages import Generate
from helexa.neuron.engine.loading.load import load_once
from helexa.neuron.engine.scheduling.sequence import Sequence
from neuron.ranks.rank_models import MODELS, PROMPTS
from numpy_tensors import numpy_tensors
from reference.vision_language import TEXTS, VisionLanguageModel, picture
from tiny_models import tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

OFTEN = ("gpt_oss", "qwen3_5_moe")
NAMES = [name if name in OFTEN else pytest.param(name, marks=pytest.mark.nightly) for name in MODELS]
SEEN = [
    name if name == "qwen3_vl" else pytest.param(name, marks=pytest.mark.nightly)
    for name in TEXTS
    if name != "qwen2_5_vl"  # this tiny model has heads of 16 numbers, which the native kernels do not support
]


def logits_of(model: Path, sequences: list[Sequence], **options: Any) -> list[NDArray[np.float32]]:
    """Return the logits of each step, prefilled in chunks and decoded in one batch."""
    tensors.set_num_threads(1)
    runner = load_once(model, EngineOptions(kv_cache_mb=8, snapshot_mb=8, threads=1, **options))
    scheduler = scheduler_of(runner, speculation=False, prefix_reuse="off", max_step_tokens=48)
    for sequence in sequences:
        assert scheduler.add(sequence) is None
    steps: list[NDArray[np.float32]] = []
    while not scheduler.idle:
        plan = scheduler.plan()
        rows = runner.logits_of(build_step(plan, (), runner.encoder)).numpy().copy()
        steps.append(rows)
        scheduler.commit(plan, rows.argmax(-1).tolist())
    return steps


def text_sequences() -> list[Sequence]:
    return [
        Sequence(Generate(id=number, prompt=prompt, max_tokens=6, sampling=GREEDY))
        for number, prompt in enumerate(PROMPTS)
    ]


def assert_same_steps(expected: list[NDArray[np.float32]], steps: list[NDArray[np.float32]]) -> None:
    assert len(steps) == len(expected)
    for rows, expected_rows in zip(steps, expected, strict=True):
        assert rows.dtype == np.float32
        np.testing.assert_array_equal(rows, expected_rows)


@pytest.mark.parametrize("quant", ["", "q4k"])
@pytest.mark.parametrize("name", NAMES)
def test_logits_with_numpy_equal_those_with_torch(name: str, quant: str, tmp_path: Path) -> None:
    tiny_model(tmp_path, seed=2, **MODELS[name])
    expected = logits_of(tmp_path, text_sequences(), quant=quant)
    with numpy_tensors():
        assert_same_steps(expected, logits_of(tmp_path, text_sequences(), quant=quant))


@pytest.mark.parametrize("name", SEEN)
def test_logits_of_prompts_with_images_equal_those_with_torch(name: str, tmp_path: Path) -> None:
    model = VisionLanguageModel(tmp_path, name, dtype="auto", kernels="auto")
    prompts = [model.prompt(5, picture(64, 64), 9), model.prompt(picture(200, 120, 1), picture(33, 250, 2), 3, seed=1)]

    def steps() -> list[NDArray[np.float32]]:
        return logits_of(tmp_path, [prompt.sequence(number) for number, prompt in enumerate(prompts)], images=True)

    expected = steps()
    with numpy_tensors():
        assert_same_steps(expected, steps())
