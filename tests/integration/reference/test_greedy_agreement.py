"""The native kernels choose the tokens of float32, for weights in bfloat16 and weights quantized at load.

The logits of small random models are flat, and some models amplify each rounding. Errors of the kernels are therefore
compared with the errors of plain torch in bfloat16 on the same (dequantized) weights.
"""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from scheduler_runs import GREEDY, scheduler_of
from torch import Tensor

from helexa.neuron.engine.execution.step_builder_and_penalties import build_step
from helexa.neuron.engine.ipc.engine_options import EngineOptions
from helexa.neuron.engine.ipc.messages import Generate
from helexa.neuron.engine.loading.load import load_once
from helexa.neuron.engine.scheduling.sequence import Sequence
from helexa.neuron.engine.step_input_and_graph_sizes import int32
from neuron.ranks.rank_models import MODELS
from nightly import daily
from tiny_models import tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

ROWS = 192  # of the first step; the snapshot at the end of the last full page of a longer prompt ends it
PROMPT = [(37 * i + 7 * i * i) % 320 for i in range(ROWS + 1)]
FACTORS = {"": 1.0, "q4k": 3.0}
"""Maximum error of the kernels, in errors of bfloat16. Products with quantized weights round activations to 8 bits."""
CASES = daily(
    [("gemma4, shared keys", "q4k"), ("nemotron_h", "q4k")],
    [(name, quant) for name in MODELS for quant in FACTORS],
    several=True,
)


def logits_of(model: Path, **options: Any) -> Tensor:
    """Return the logits after each token of the prompt, float32 [T, V], with mean 0 in each row."""
    runner = load_once(model, EngineOptions(kv_cache_mb=8, threads=1, **options))
    scheduler = scheduler_of(runner, speculation=False, prefix_reuse="off", max_step_tokens=ROWS)
    assert scheduler.add(Sequence(Generate(id=0, prompt=PROMPT, max_tokens=1, sampling=GREEDY))) is None
    step = build_step(scheduler.plan())
    assert len(step.tokens) == ROWS
    every_row = msgspec.structs.replace(step, sample_rows=int32(range(ROWS)), sampling=None)
    logits = torch.as_tensor(runner.logits_of(every_row).float().clone())
    return logits - logits.mean(-1, keepdim=True)


@pytest.mark.parametrize(("name", "quant"), CASES)
def test_native_kernels_agree_with_float32_tokens_about_as_often_as_bfloat16(
    name: str, quant: str, tmp_path: Path
) -> None:
    tiny_model(tmp_path, seed=2, **MODELS[name]).bfloat16().save_pretrained(tmp_path, max_shard_size="50kB")
    exact = logits_of(tmp_path, quant=quant, dtype="float32")
    rounded = logits_of(tmp_path, quant=quant, dtype="bfloat16", kernels="torch")
    logits = logits_of(tmp_path, quant=quant)

    def error(values: Tensor) -> float:
        return float((values - exact).square().mean(-1).sqrt().median())

    def agreement(values: Tensor) -> float:
        return float((values.argmax(-1) == exact.argmax(-1)).float().mean())

    assert error(logits) < FACTORS[quant] * error(rounded)
    assert agreement(logits) > agreement(rounded) - 0.1
    if quant:  # the kernels compute the quantized weights, whose errors are larger than those of the kernels
        plain = logits_of(tmp_path, dtype="float32")
        assert error(logits) < error(plain)
