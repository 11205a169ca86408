"""A model with recurrent layers: scheduling does not change the tokens or the state of a sequence."""

from collections.abc import Iterator
from itertools import product
from typing import Any, ClassVar

import pytest
import torch
from scheduler_runs import GREEDY, generate, scheduler_of
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from helexa.neuron.engine.execution.runner import Runner
from helexa.neuron.engine.execution.step_builder_and_penalties import build_step
from helexa.neuron.engine.ipc.engine_options import EngineOptions
from helexa.neuron.engine.ipc.messages import Generate
from helexa.neuron.engine.loading.load import load_once
from helexa.neuron.engine.scheduling.ngrams_and_counts import Drafter
from helexa.neuron.engine.scheduling.plan import Plan
from helexa.neuron.engine.scheduling.scheduler import Scheduler
from helexa.neuron.engine.scheduling.sequence import Sequence
from helexa.neuron.engine.step_input_and_graph_sizes import StepInput
from helexa.neuron.ops.native.native_ops import NativeOps
from nightly import daily

TOKENS = 24
PROMPTS = [
    [(900 + 37 * n + 7 * i * i) % 311 for i in range(length)] for n, length in enumerate((1, 5, 63, 64, 65, 200))
]


SHAPE: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {
        "num_attention_heads": 4,
        "head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    },
    "nemotron_h": {
        "num_attention_heads": 4,
        "head_dim": 32,
        "layers_block_type": ["linear_attention", "full_attention", "mlp", "linear_attention"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "ssm_state_size": 16,
        "n_groups": 2,
    },
    "granitemoehybrid": {
        "num_attention_heads": 2,
        "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
        "mamba_n_heads": 4,
        "mamba_d_head": 32,
        "mamba_d_state": 32,
        "intermediate_size": 32,
        "shared_intermediate_size": 64,
    },
    "lfm2": {
        "num_attention_heads": 2,
        "block_auto_adjust_ff_dim": False,
        "layer_types": ["conv", "full_attention", "conv", "full_attention"],
    },
}
OFTEN = [("qwen3_5_text", "reference"), *((name, "native") for name in MODELS if name != "granitemoehybrid")]


@pytest.fixture(scope="module", params=daily(OFTEN, product(MODELS, ("reference", "native"))), ids=" ".join)
def runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    """A model with random weights, on plain torch in float32, and on the native kernels with captured graphs."""
    folder = tmp_path_factory.mktemp("hybrid")
    model_type, kernels = request.param
    config = AutoConfig.for_model(model_type, **SHAPE | MODELS[model_type])
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:  # larger than trained weights, so that tokens depend on distant tokens
                parameter.normal_(0, 0.1)
            elif "A_log" not in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    dtype = "float32" if kernels == "reference" else "auto"
    runner = load_once(folder, EngineOptions(dtype=dtype, kv_cache_mb=16, snapshot_mb=8, max_sequences=8))
    assert (runner.ops.name == NativeOps.name) == (kernels == "native")
    yield runner
    if isinstance(runner.ops, NativeOps):
        assert runner.ops._graphs.complete, "the steps ran without graphs"


def scheduler(runner: Runner, **options: Any) -> Scheduler:
    return scheduler_of(runner, **{"max_sequences": 8, **options})


@pytest.fixture(scope="module")
def expected_tokens(runner: Runner) -> list[list[int]]:
    off = {"prefix_reuse": "off", "speculation": False}
    return [generate(runner, scheduler(runner, **off), [prompt], TOKENS)[0] for prompt in PROMPTS]


@pytest.mark.parametrize("options", [{}, {"max_step_tokens": 16}, {"speculation": False}, {"pages": 9}])
def test_chunks_preemption_and_batching_do_not_change_the_tokens_of_a_hybrid_model(
    runner: Runner, expected_tokens: list[list[int]], options: dict[str, int]
) -> None:
    assert generate(runner, scheduler(runner, **options), PROMPTS, TOKENS) == expected_tokens


@pytest.mark.parametrize("options", [{}, {"max_step_tokens": 16}, {"pages": 9}])
def test_overlapping_steps_do_not_change_the_tokens_of_a_hybrid_model(
    runner: Runner, expected_tokens: list[list[int]], options: dict[str, int]
) -> None:
    overlapping = scheduler(runner, speculation=False, **options)
    assert generate(runner, overlapping, PROMPTS, TOKENS, overlap=True) == expected_tokens
    longer = [prompt + tokens for prompt, tokens in zip(PROMPTS, expected_tokens, strict=True)]
    from_snapshots = generate(runner, overlapping, longer, TOKENS, overlap=True)
    assert from_snapshots == generate(runner, scheduler(runner, prefix_reuse="off", speculation=False), longer, TOKENS)


class PresetDrafter(Drafter):
    """A drafter whose first two tokens are always right and whose third token is wrong."""

    completions: ClassVar[list[list[int]]] = []

    def draft(self, limit: int) -> tuple[int, ...]:
        (completion,) = [tokens for tokens in self.completions if tokens[: len(self._tokens)] == self._tokens]
        next_tokens = completion[len(self._tokens) :]
        return tuple([*next_tokens[:2], (next_tokens[2:3] or [0])[0] ^ 1][:limit])


def test_drafts_do_not_change_the_tokens_of_a_hybrid_model(
    runner: Runner, expected_tokens: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("helexa.neuron.engine.scheduling.planning_and_preemption.Drafter", PresetDrafter)
    PresetDrafter.completions = [prompt + tokens for prompt, tokens in zip(PROMPTS, expected_tokens, strict=True)]
    speculating = scheduler(runner, speculation_max_sequences=8)
    steps = 0
    plan_step = speculating.plan

    def spy() -> Plan:
        nonlocal steps
        steps += 1
        return plan_step()

    speculating.plan = spy  # type: ignore[method-assign]
    assert generate(runner, speculating, PROMPTS, TOKENS) == expected_tokens
    assert steps < TOKENS, "no draft was accepted"


def prefill(
    runner: Runner, scheduler: Scheduler, prompt: list[int], monkeypatch: pytest.MonkeyPatch, turn: int = 0
) -> tuple[int, Tensor, list[Tensor]]:
    """Compute a prompt; return its cached tokens, its logits and its recurrent state."""
    sequence = Sequence(Generate(id=0, prompt=prompt, max_tokens=1, sampling=GREEDY, turn=turn))
    assert scheduler.add(sequence) is None
    computed: list[Tensor] = []

    def spy(step: StepInput, last: Tensor | None) -> tuple[Tensor, None]:
        computed.append(Runner.compute(runner, step, last)[0].clone())
        return computed[-1], None

    while True:
        plan = scheduler.plan()
        slot, ends = sequence.slot, plan[0].samples
        with monkeypatch.context() as patch:
            patch.setattr(runner, "compute", spy)
            sampled = runner.launch(build_step(plan)).read().tokens
        scheduler.commit(plan, sampled)
        if ends:
            state = [tensor[slot].clone() for cache in runner._states for tensor in cache.parts()]
            return sequence.cached, computed[-1], state


@pytest.mark.parametrize(
    ("case", "cached"), [("second turn", 192), ("same turn again", 192), ("changed last turn", 128)]
)
def test_prefix_hit_of_a_hybrid_model_has_the_same_state_and_logits_as_a_cold_run(
    runner: Runner, case: str, cached: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, turn = PROMPTS[-1], 150
    warm = scheduler(runner, speculation=False)
    prefill(runner, warm, prompt, monkeypatch, turn)
    continued = {
        "second turn": [*prompt, *PROMPTS[2]],
        "same turn again": prompt,
        "changed last turn": [*prompt[:turn], *PROMPTS[2]],
    }[case]
    warm_cached, logits, state = prefill(runner, warm, continued, monkeypatch)
    cold = scheduler(runner, prefix_reuse="off")
    cold_cached, cold_logits, cold_state = prefill(runner, cold, continued, monkeypatch)
    assert (warm_cached, cold_cached) == (cached, 0)
    for actual, expected in zip([logits, *state], [cold_logits, *cold_state], strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
