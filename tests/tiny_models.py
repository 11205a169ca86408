"""Small models of random weights, written by transformers and compared with transformers."""

from pathlib import Path
from typing import Any

import torch
from driving import GREEDY, scheduler_of
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from helexa.neuron.engine.execution.runner import Runner
from helexa.neuron.engine.execution.step_builder import build_step
from helexa.neuron.engine.ipc.messages import Generate
from helexa.neuron.engine.scheduling.sequence import Sequence

LENGTHS = (1, 2, 17, 63, 64, 65, 150, 300)
"""Of prompts; 64 is a page."""
STEPS = 32


def tiny_model(folder: Path, seed: int = 0, auto: Any = AutoModelForCausalLM, **settings: Any) -> PreTrainedModel:
    """A model of random weights in float32, of the class that `auto` chooses, saved to `folder` in several files.

    Norms, biases and sinks, which start as constants that would hide faults, are random, too.
    """
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    torch.manual_seed(seed)
    model = auto.from_config(config, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1 or "bias" in name:
            torch.nn.init.normal_(parameter, mean=float("norm" in name and bool((parameter == 1).all())), std=0.3)
        elif "embed_tokens" not in name:  # so that layers outweigh the embedding, and the logits lie apart
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder, max_shard_size="50kB")
    return model


def assert_equal_to(reference: PreTrainedModel, runner: Runner, tolerance: float = 1e-4) -> None:
    """Prompts prefilled whole or in chunks, decoded side by side or alone, give the reference's logits and tokens."""
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, runner.facts.vocab_size, (n,), generator=generator).tolist() for n in LENGTHS]
    expected: dict[int, Tensor] = {}
    for chunk, lengths in ((1024, LENGTHS), (48, LENGTHS), (128, (300,))):
        chosen = [prompt for prompt in prompts if len(prompt) in lengths]
        for prompt, (tokens, logits) in zip(chosen, decode(runner, chosen, max_step_tokens=chunk), strict=True):
            length = len(prompt)
            if length not in expected:  # the tokens below are right after those before them, so all are
                with torch.inference_mode():
                    expected[length] = reference(torch.tensor([prompt + tokens])).logits[0, length - 1 : -1]
            assert tokens == expected[length].argmax(-1).tolist()
            torch.testing.assert_close(logits, expected[length], rtol=0, atol=tolerance)


def decode(
    runner: Runner, prompts: list[list[int]], steps: int = STEPS, **options: Any
) -> list[tuple[list[int], Tensor]]:
    """For each prompt, all run together, `steps` greedy tokens and the logits [steps, V] that they were chosen from."""
    scheduler = scheduler_of(runner, speculation=False, prefix_reuse="off", **options)
    for number, prompt in enumerate(prompts):
        request = Generate(id=number, prompt=prompt, max_tokens=steps, sampling=GREEDY)
        assert scheduler.add(Sequence(request)) is None
    tokens: list[list[int]] = [[] for _ in prompts]
    logits: list[list[Tensor]] = [[] for _ in prompts]
    while not scheduler.idle:
        plan = scheduler.plan()
        rows = runner.forward(build_step(plan)).float().clone()
        for entry, row in zip((entry for entry in plan if entry.samples), rows, strict=True):
            logits[entry.sequence.id].append(row)
        for output in scheduler.commit(plan, rows.argmax(-1).tolist()):
            tokens[output.id] += output.tokens
    return [(own, torch.stack(of)) for own, of in zip(tokens, logits, strict=True)]
