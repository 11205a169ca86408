"""Small models with random weights, written by transformers and compared with transformers."""

from pathlib import Path
from typing import Any

import torch
from scheduler_runs import GREEDY, scheduler_of
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from helexa.neuron.engine.execution.runner import Runner
from helexa.neuron.engine.execution.step_builder_and_penalties import build_step
from helexa.neuron.engine.ipc.messages import Generate
from helexa.neuron.engine.scheduling.sequence import Sequence
from nightly import NIGHTLY

LENGTHS = (1, 2, 17, 63, 64, 65, 150, 300)
"""Prompt lengths in tokens; a KV page has 64 positions."""
STEPS = 32

WHOLE = ((1024, LENGTHS, STEPS), (48, LENGTHS, 8), (128, (300,), 8))
"""Runs that compare a model: most tokens of a step, lengths of the prompts, and number of tokens after each prompt.

Chunks change only what a prompt leaves in the cache, so few tokens after the prompt show a difference.
"""
BRIEF = ((1024, (17, 65, 150), 8),)
"""The run that compares a model whose computation another test compares in `WHOLE`."""


def tiny_model(folder: Path, seed: int = 0, auto: Any = AutoModelForCausalLM, **settings: Any) -> PreTrainedModel:
    """Create a float32 model with random weights, save it to `folder` in several files and return it.

    Norms, biases and sinks are random too: their constant initial values would hide errors.
    """
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    torch.manual_seed(seed)
    model = auto.from_config(config, dtype=torch.float32).eval()  # without dropout
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1 or "bias" in name:
            torch.nn.init.normal_(parameter, mean=float("norm" in name and bool((parameter == 1).all())), std=0.3)
        elif "embed_tokens" not in name:  # large layer weights keep the logits distinct
            torch.nn.init.normal_(parameter, std=0.1)
        if config.model_type == "gemma4" and name.endswith(("q_norm.weight", "k_norm.weight")):
            parameter.data *= (
                0.4  # these norms contain the scale of attention; larger ones would amplify rounding errors
            )
    for name, buffer in model.named_buffers():
        if "bias" in name:  # of a router: only some models have it as a parameter
            torch.nn.init.normal_(buffer, std=0.3)
        elif name.endswith(("layer_scalar", "std_scale", "_max")):
            torch.nn.init.uniform_(buffer, 0.5, 1.5)
        elif name.endswith("_min"):
            torch.nn.init.uniform_(buffer, -1.5, -0.5)
    model.save_pretrained(folder, max_shard_size="50kB")
    return model


def assert_equal_to(
    reference: PreTrainedModel, runner: Runner, tolerance: float = 1e-4, *, brief: bool = False
) -> None:
    """Assert that the runner gives the reference's logits and tokens, for chunked prefill and batched decode too.

    Args:
        brief: whether the test is about what files contain, and another test compares the same computation in full.
    """
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, runner.facts.vocab_size, (n,), generator=generator).tolist() for n in LENGTHS]
    expected: dict[int, Tensor] = {}
    for chunk, lengths, steps in BRIEF if brief and not NIGHTLY else WHOLE:
        chosen = [prompt for prompt in prompts if len(prompt) in lengths]
        for prompt, (tokens, logits) in zip(chosen, decode(runner, chosen, steps, max_step_tokens=chunk), strict=True):
            length = len(prompt)
            if length not in expected:  # if all tokens equal the argmax, `tokens` is the reference's sequence
                with torch.inference_mode():
                    expected[length] = reference(torch.tensor([prompt + tokens])).logits[0, length - 1 : -1]
            assert tokens == expected[length][:steps].argmax(-1).tolist()
            torch.testing.assert_close(logits, expected[length][:steps], rtol=0, atol=tolerance)


def decode(
    runner: Runner, prompts: list[list[int]], steps: int = STEPS, **options: Any
) -> list[tuple[list[int], Tensor]]:
    """Decode all prompts in one batch; return for each prompt `steps` greedy tokens and their logits [steps, V]."""
    scheduler = scheduler_of(runner, speculation=False, prefix_reuse="off", **options)
    for number, prompt in enumerate(prompts):
        request = Generate(id=number, prompt=prompt, max_tokens=steps, sampling=GREEDY)
        assert scheduler.add(Sequence(request)) is None
    tokens: list[list[int]] = [[] for _ in prompts]
    logits: list[list[Tensor]] = [[] for _ in prompts]
    while not scheduler.idle:
        plan = scheduler.plan()
        rows = runner.logits_of(build_step(plan)).float().clone()
        for entry, row in zip((entry for entry in plan if entry.samples), rows, strict=True):
            logits[entry.sequence.id].append(row)
        for output in scheduler.commit(plan, rows.argmax(-1).tolist()):
            tokens[output.id] += output.tokens
    return [
        (sequence_tokens, torch.stack(sequence_logits))
        for sequence_tokens, sequence_logits in zip(tokens, logits, strict=True)
    ]
