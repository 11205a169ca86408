"""A model with weights loaded in all processes, and its measured memory.

Only GPUs are measured. The steps of other devices allocate what the memory request states.
"""

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass

import msgspec

from helexa.neuron import tensors
from helexa.neuron.engine.execution.ranks_and_stages import OtherProcesses
from helexa.neuron.engine.execution.runner import Runner
from helexa.neuron.engine.execution.step_builder_and_penalties import build_step
from helexa.neuron.engine.execution.step_memory import DeviceMemory, StepMemory
from helexa.neuron.engine.ipc.engine_options import EngineOptions
from helexa.neuron.engine.ipc.messages import Generate, MemoryGrant, MemoryRequest, SamplingParams
from helexa.neuron.engine.loading.memory_division import LEAST_CONTEXT
from helexa.neuron.engine.scheduling.plan import PlanEntry
from helexa.neuron.engine.scheduling.sequence import Sequence
from helexa.neuron.engine.step_input_and_graph_sizes import StepInput
from helexa.neuron.models.decoder import Decoder
from helexa.neuron.ops.interface import Ops
from helexa.neuron.ops.kernel_header import PAGE_SIZE

_log = logging.getLogger("helexa.neuron.engine")
# Settings for the measured steps. They need more memory than greedy sampling, because penalties copy the logits.
_DRAWN = SamplingParams(temperature=0.8, top_p=0.9, repetition_penalty=1.1)
# Prompt length -> sampling settings. These lengths use other matmul kernels than the largest step, and these settings
# use other sampling kernels than `_DRAWN`.
_SHORTER = {32: SamplingParams(temperature=0), 300: SamplingParams()}


@dataclass(frozen=True)
class LoadedModel:
    """A model with its weights, but without a KV cache."""

    model: Decoder  # the part of rank 0
    ops: Ops  # the kernels with which the model was built
    options: EngineOptions
    others: tuple[OtherProcesses, ...] = ()  # the other ranks of this host, and the stages on other hosts

    def runner(self, request: MemoryRequest, grant: MemoryGrant, measure: bool = False) -> Runner:
        """Allocate the KV caches of all processes, and return the runner of this process.

        Args:
            measure: whether the other processes measure the memory of the following steps (see `memory_of_others`).
        """
        for processes in self.others:
            processes.allocate(request, grant, measure)
        return Runner(self.model, self.ops, self.options, request, grant, self.others)

    def memory_of_others(self) -> list[DeviceMemory]:
        """Return the memory that other processes measured since `runner(measure=True)`."""
        return [memory for processes in self.others for memory in processes.measured_memory()]


def measured(memory_request: MemoryRequest, ranks: Collection[DeviceMemory], graphs: bool) -> MemoryRequest:
    """Return `memory_request` with measured sizes of the weights and the largest step.

    Args:
        ranks: measured memory of each rank.
        graphs: whether decode steps will be captured as graphs.
    """
    return msgspec.structs.replace(
        memory_request,
        # The same request applies to each device, so it states the rank with the most weights and the device with the
        # least free memory.
        free=min(rank.free for rank in ranks),
        weights=max(rank.weights for rank in ranks),
        loading=0,
        # Captured graphs have their own memory, beside that of steps without graphs.
        step=max(rank.step for rank in ranks) * (2 if graphs else 1),
        page_step=0,
        position_step=0,
    )


def measured_on_device(
    loaded: LoadedModel, memory_request: MemoryRequest, sequences: int, on_step: Callable[[], None] = lambda: None
) -> MemoryRequest:
    """Run the largest steps of a model, and return its request with measured sizes.

    Args:
        sequences: number of sequences in the largest decode step.
        on_step: called after each step. The first run of a step compiles kernels and may take minutes.
    """
    weights = tensors.cuda.memory_allocated()
    tokens = min(loaded.options.max_step_tokens, memory_request.context)
    pages = max(memory_request.pages_for(tokens), memory_request.pages_for(min(memory_request.context, LEAST_CONTEXT)))
    # A temporary KV cache, just large enough for these steps.
    grant = MemoryGrant(total=0, pages=pages, sequences=sequences, snapshots=0)
    runner = loaded.runner(memory_request, grant, measure=True)
    memory = StepMemory(weights)
    for step in largest(tokens, sequences):
        runner.launch(step).read()
        on_step()
    graphs = bool(runner.buckets)
    request = measured(memory_request, [memory.read(), *loaded.memory_of_others()], graphs)
    ops = loaded.ops
    # The measured contexts are short. In long contexts, attention needs memory for more partial results.
    partials = max(ops.partials_bytes(sequences, *shape) for shape in loaded.model.attention_shapes())
    request = msgspec.structs.replace(request, step=request.step + partials * (2 if graphs else 1))
    # Kernels that copy pages need memory for each page in use. The short contexts did not measure this memory, so its
    # estimate is kept.
    if ops.copies_pages:
        request = msgspec.structs.replace(
            request, page_step=memory_request.page_step, position_step=memory_request.position_step
        )
    mebibytes = [size >> 20 for size in (request.weights, request.step, request.free)]
    _log.info("memory measured weights_mb=%d steps_mb=%d free_mb=%d", *mebibytes)
    return request


def largest(step_tokens: int, sequences: int) -> list[StepInput]:
    """Return the largest steps, and shorter steps that compile the remaining kernels."""
    # The most memory is needed by the longest prompt chunk, or by a decode step in which all sequences sample. The
    # shorter prompt chunks let all kernels be compiled before requests arrive.
    sampling_by_length = {
        **{length: sampling for length, sampling in _SHORTER.items() if length < step_tokens},
        step_tokens: _DRAWN,
    }
    prompts = [[PlanEntry(_sequence(0, length, sampling), length)] for length, sampling in sampling_by_length.items()]
    return [build_step(plan) for plan in (*prompts, [PlanEntry(_sequence(n, 1), 1) for n in range(sequences)])]


def _sequence(number: int, length: int, sampling: SamplingParams = _DRAWN) -> Sequence:
    request = Generate(id=number, prompt=[0] * length, max_tokens=1, sampling=sampling)
    return Sequence(request, pages=list(range(-(-length // PAGE_SIZE))), slot=0)
