"""What a loaded model takes of an accelerator's memory, measured: what is asked for, in place of what was reckoned."""

from collections.abc import Callable
from typing import Any

import msgspec
import torch

from helexa.neuron.engine.messages import Generate, Needs, SamplingParams
from helexa.neuron.engine.plan import Plan, PlanEntry
from helexa.neuron.engine.sequence import Sequence

_ALLOWANCE = 1.1  # of a step, for blocks of memory that no tensor fits into
_DRAWN = SamplingParams(temperature=0.8, top_p=0.9)  # takes more than the likeliest token does
_SHORTER = {32: SamplingParams(temperature=0), 300: SamplingParams()}
"""Rows whose products are others' than those of few rows, and of many; and what else there are kernels for."""


def measured(asked: Needs, weights: int, run: Callable[[], None], graphs: bool, cuda: Any = torch.cuda) -> Needs:
    """The same needs, with the weights as they lie in memory now, and steps as they were seen to be.

    Args:
        weights: bytes of tensors when the model had been loaded, and nothing else was there.
        run: computes the largest steps, one after the other.
        graphs: steps of decoding will be recorded, and keep what they take for themselves.
        cuda: tells of memory; `torch.cuda`.
    """
    cuda.empty_cache()
    cuda.reset_peak_memory_stats()
    before = cuda.memory_allocated()
    run()
    cuda.synchronize()
    step = int((cuda.max_memory_allocated() - before) * _ALLOWANCE)
    cuda.empty_cache()
    return msgspec.structs.replace(
        asked,
        free=cuda.mem_get_info()[0] + cuda.memory_reserved(),
        weights=weights,
        loading=0,
        step=step * (2 if graphs else 1),
        page_step=0,
        position_step=0,
    )


def largest(step_tokens: int, sequences: int, page_size: int) -> list[Plan]:
    """Steps than which none takes more: a piece of a prompt, and a token drawn for each of so many sequences.

    Before them come shorter pieces, so that all kernels are compiled before anybody waits for them.
    """
    pieces = {**{length: how for length, how in _SHORTER.items() if length < step_tokens}, step_tokens: _DRAWN}
    prompts = [[PlanEntry(_sequence(0, length, page_size, how), length)] for length, how in pieces.items()]
    return [*prompts, [PlanEntry(_sequence(n, 1, page_size), 1) for n in range(sequences)]]


def _sequence(number: int, length: int, page_size: int, sampling: SamplingParams = _DRAWN) -> Sequence:
    request = Generate(id=number, prompt=[0] * length, max_tokens=1, sampling=sampling)
    return Sequence(request, pages=list(range(-(-length // page_size))), slot=0)
