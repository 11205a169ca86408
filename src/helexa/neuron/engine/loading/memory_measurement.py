"""Measures the memory of a loaded model on a GPU, and returns a memory request with the measured sizes."""

import logging
from collections.abc import Callable, Collection

import msgspec
import torch

from helexa.neuron.engine.execution.device_memory import DeviceMemory
from helexa.neuron.engine.execution.step_builder import build_step
from helexa.neuron.engine.execution.step_memory import StepMemory
from helexa.neuron.engine.ipc.messages import Generate, MemoryGrant, MemoryRequest, SamplingParams
from helexa.neuron.engine.loading.fit import LEAST_CONTEXT
from helexa.neuron.engine.loading.loaded_model import LoadedModel
from helexa.neuron.engine.scheduling.plan import PlanEntry
from helexa.neuron.engine.scheduling.sequence import Sequence
from helexa.neuron.engine.step.step_input import StepInput
from helexa.neuron.ops.constants import PAGE_SIZE

_log = logging.getLogger("helexa.neuron.engine")
_DRAWN = SamplingParams(temperature=0.8, top_p=0.9)  # needs more memory than greedy sampling
_SHORTER = {32: SamplingParams(temperature=0), 300: SamplingParams()}
"""Prompt lengths that need other matmul kernels than the largest step, with settings for other sampling kernels."""


def measured(memory_request: MemoryRequest, ranks: Collection[DeviceMemory], graphs: bool) -> MemoryRequest:
    """Return a copy of `memory_request` with measured sizes of the weights and the largest step.

    Args:
        ranks: the memory of each rank. The request is for the rank that needs the most memory, on the device with the
            least free memory.
        graphs: whether decode steps will be captured as graphs. Graphs have their own memory, so the size of a step
            doubles.
    """
    return msgspec.structs.replace(
        memory_request,
        free=min(rank.free for rank in ranks),
        weights=max(rank.weights for rank in ranks),
        loading=0,
        step=max(rank.step for rank in ranks) * (2 if graphs else 1),
        page_step=0,
        position_step=0,
    )


def measured_on_device(
    loaded: LoadedModel, memory_request: MemoryRequest, sequences: int, on_step: Callable[[], None] = lambda: None
) -> MemoryRequest:
    """Run the largest steps of a loaded model, and return its memory request with the measured sizes.

    The steps use a temporary KV cache that is just large enough for them.

    Args:
        sequences: number of sequences in the largest decode step.
        on_step: called after each step. The first run of a step compiles kernels and may take minutes.
    """
    weights = torch.cuda.memory_allocated()
    tokens = min(loaded.options.max_step_tokens, memory_request.context)
    pages = max(memory_request.pages_for(tokens), memory_request.pages_for(min(memory_request.context, LEAST_CONTEXT)))
    grant = MemoryGrant(total=0, pages=pages, sequences=sequences, snapshots=0)
    runner = loaded.runner(memory_request, grant, measure=True)
    memory = StepMemory(weights)
    for step in largest(tokens, sequences):
        runner.run(step)
        on_step()
    graphs = bool(runner.buckets)
    request = measured(memory_request, [memory.read(), *loaded.memory_of_others()], graphs)
    ops, settings = loaded.ops, loaded.model.settings
    # The measured contexts are short, but long contexts need memory for more partial results.
    partials = ops.partials_bytes(sequences, settings.heads, settings.kv_heads, settings.head_dim)
    request = msgspec.structs.replace(request, step=request.step + partials * (2 if graphs else 1))
    if ops.gathers:
        request = msgspec.structs.replace(
            request, page_step=memory_request.page_step, position_step=memory_request.position_step
        )
    mebibytes = [size >> 20 for size in (request.weights, request.step, request.free)]
    _log.info("measured: weights %d MiB, steps %d MiB, of %d MiB free", *mebibytes)
    return request


def largest(step_tokens: int, sequences: int) -> list[StepInput]:
    """Return the inputs of the steps that need the most memory.

    These are the longest prompt chunk, and a decode step in which all sequences sample. Shorter prompt chunks come
    first, so that all kernels are compiled before requests arrive.

    Args:
        step_tokens: length of the largest prompt chunk.
        sequences: number of sequences in the decode step.
    """
    sampling_by_length = {
        **{length: sampling for length, sampling in _SHORTER.items() if length < step_tokens},
        step_tokens: _DRAWN,
    }
    prompts = [[PlanEntry(_sequence(0, length, sampling), length)] for length, sampling in sampling_by_length.items()]
    return [build_step(plan) for plan in (*prompts, [PlanEntry(_sequence(n, 1), 1) for n in range(sequences)])]


def _sequence(number: int, length: int, sampling: SamplingParams = _DRAWN) -> Sequence:
    request = Generate(id=number, prompt=[0] * length, max_tokens=1, sampling=sampling)
    return Sequence(request, pages=list(range(-(-length // PAGE_SIZE))), slot=0)
