"""Measure helexa's engine alone, in one process without a server: decode rates and prefill rates, as JSON lines.

usage: python perf/engine.py MODEL [--rows decode@1,decode@1:7700,sampled@4,prefill@512] [--threads N]
           [--dtype auto] [--quant FORMAT] [--activations auto] [--kv-dtype auto] [--tensor-parallel 1]
           [--repetition-penalty 1]

MODEL is a path to a GGUF file or a Hugging Face folder, or any model id that a node accepts (`helexa/small`). There are
three kinds of rows:

    decode@B:C      B sequences decode together for 64 greedy steps, from a context of C tokens (64 if C is missing).
                    The time includes the scheduler and the sampler.
    sampled@B:C     the same with temperature 0.8, top_p 0.9 and top_k 40.
    prefill@N       one prompt of N tokens, until its first output token.

Speculation is off. All prompts differ, so there are no prefix cache hits. Each row is a JSON line with these keys:

    engine, row, kernels    names of the engine, the row and the kernels
    tok_s                   tokens per second of all sequences together
    step_bytes, kv_bytes    bytes of weights and of KV cache that a decode step reads
    bandwidth_gb_s          memory read bandwidth of the machine, measured directly before a decode row
    ceiling_tok_s           highest decode rate that this bandwidth allows
    share_of_greedy         time of greedy decode steps divided by the time of sampled steps, which alternate with them;
                            only for sampled rows
    exchange_share          fraction of the time of decoding in which rank 0 exchanges results with the other ranks or
                            waits for them
"""

import gc
import os
import time
from collections.abc import Callable
from statistics import median

from helexa.neuron.engine.ipc import ENVIRONMENT

os.environ.update(ENVIRONMENT | os.environ)  # same environment as an engine process

import msgspec
import torch
from support.local_model import local_path
from support.rows import DECODE_STEPS, TEMPERATURE, TOP_K, TOP_P, Row, parser, prompt, report

from helexa.core.errors import HelexaError
from helexa.neuron import tensors
from helexa.neuron.engine.execution.step_builder_and_penalties import build_step
from helexa.neuron.engine.ipc.engine_options import EngineOptions
from helexa.neuron.engine.ipc.messages import Generate, SamplingParams
from helexa.neuron.engine.kv_cache_and_prefix_hashes import PagePool
from helexa.neuron.engine.loading.backend_kernels_and_kv_dtype import choose_backend
from helexa.neuron.engine.loading.load import load_once
from helexa.neuron.engine.scheduling.scheduler import Scheduler
from helexa.neuron.engine.scheduling.sequence import Sequence
from helexa.neuron.ops.kernel_header import PAGE_SIZE


class Engine:
    """A model that is loaded in this process. Every measurement uses a new scheduler and an empty prefix cache."""

    def __init__(self, model: str, options: EngineOptions, repetition_penalty: float = 1.0) -> None:
        self._options = options
        self._greedy = SamplingParams(temperature=0, repetition_penalty=repetition_penalty)
        self._sampled = SamplingParams(
            temperature=TEMPERATURE, top_p=TOP_P, top_k=TOP_K, repetition_penalty=repetition_penalty
        )
        choose_backend(options)
        if options.threads:
            tensors.set_num_threads(options.threads)
        self._runner = load_once(local_path(model), options)
        gc.freeze()  # like an engine process
        self._share = 0.0  # of the last decode row's time, for exchanges with other ranks
        # Different contents in all pages prevent the host from merging pages.
        self._gibibyte = torch.arange(1 << 27, dtype=torch.float64)

    def measure(self, row: Row) -> None:
        """Measure a row and print its output line."""
        facts, kernels = self._runner.facts, self._runner.ops.name
        positions_total = facts.kv_pages * PAGE_SIZE
        if row.context + DECODE_STEPS > facts.context_length or row.positions > positions_total:
            raise SystemExit(
                f"{row.name}: the model has a context of {facts.context_length}, its cache {positions_total} positions"
            )
        if not row.sequences:
            rate = row.context / min(self.prefill(row) for _ in range(row.tries))
            report("helexa", row.name, rate, kernels=kernels)
            return
        bandwidth = self._read_bandwidth()
        weights = facts.step_bytes
        positions = row.sequences * (row.context + DECODE_STEPS // 2)
        kv = positions * facts.kv_bytes // positions_total
        prefill, decode = self.decode(row)
        report(
            "helexa",
            row.name,
            row.sequences * DECODE_STEPS / decode,
            ceiling_tok_s=round(row.sequences * bandwidth / (weights + kv), 1),
            step_bytes=weights,
            kv_bytes=kv,
            bandwidth_gb_s=round(bandwidth / 1e9, 1),
            kernels=kernels,
            **self._exchange_share(),
            **({"share_of_greedy": round(self.share_of_greedy(row), 4)} if row.sampled else {}),
        )
        if row.prefill_row:
            report("helexa", row.prefill_row, row.context / prefill, kernels=kernels)

    def parts(self, row: Row) -> tuple[Callable[[], None], Callable[[], None]]:
        """Return a function that runs the prompts of a row, and a function that runs its next decode step."""
        scheduler = self._start(row, self._sampled if row.sampled else self._greedy)
        return lambda: self._prefill(scheduler), lambda: self._step(scheduler)

    def decode(self, row: Row) -> tuple[float, float]:
        """Run the prompts of a row and then its decode steps, and return both durations in seconds."""
        run_prompts, run_step = self.parts(row)
        begin = time.perf_counter()
        run_prompts()
        prefilled = time.perf_counter()
        exchange_before = self._exchange_seconds()
        for _ in range(DECODE_STEPS):
            run_step()
        seconds = time.perf_counter() - prefilled
        self._share = (self._exchange_seconds() - exchange_before) / seconds
        return prefilled - begin, seconds

    def prefill(self, row: Row) -> float:
        """Prefill the prompt of a row, and return the seconds until its first output token."""
        run_prompts, _ = self.parts(row)
        begin = time.perf_counter()
        run_prompts()
        return time.perf_counter() - begin

    def share_of_greedy(self, row: Row) -> float:
        """Return the median time of greedy decode steps divided by that of sampled steps.

        Greedy and sampled steps alternate, because the machine's speed may change from one row to the next by more than
        the sampler costs.
        """
        greedy = self._start(row, self._greedy)
        sampled = self._start(row, self._sampled, greedy.pages)
        seconds: tuple[list[float], list[float]] = ([], [])
        for scheduler in (greedy, sampled):
            self._prefill(scheduler)
        for _ in range(DECODE_STEPS):
            for scheduler, values in zip((greedy, sampled), seconds, strict=True):
                begin = time.perf_counter()
                self._step(scheduler)
                values.append(time.perf_counter() - begin)
        return median(seconds[0]) / median(seconds[1])

    def close(self) -> None:
        """End the additional processes (ranks) of a tensor-parallel engine."""
        self._runner.close()

    def _exchange_seconds(self) -> float:
        exchange = self._runner.ops.exchange
        return 0.0 if exchange is None else exchange.seconds

    def _exchange_share(self) -> dict[str, float]:
        return {} if self._runner.computes_alone else {"exchange_share": round(self._share, 3)}

    def _start(self, row: Row, sampling: SamplingParams, pages: PagePool | None = None) -> Scheduler:
        """Return a scheduler with the sequences of a row. Schedulers that work in turn share `pages`."""
        scheduler = Scheduler(self._options, pages or PagePool(self._runner.facts.kv_pages, PAGE_SIZE))
        for number in range(max(row.sequences, 1)):
            request = Generate(id=number, prompt=prompt(row.context), max_tokens=1 << 20, sampling=sampling)
            rejection = scheduler.add(Sequence(request))
            if rejection is not None:
                raise SystemExit(rejection.error)
        return scheduler

    def _prefill(self, scheduler: Scheduler) -> None:
        """Run steps until each sequence has an output token."""
        sequences = list(scheduler.waiting)
        while any(sequence.generated == 0 for sequence in sequences):
            self._step(scheduler)

    def _step(self, scheduler: Scheduler) -> None:
        plan = scheduler.plan()
        scheduler.commit(plan, self._runner.launch(build_step(plan)).read().tokens)

    def _read_bandwidth(self) -> float:
        """Return the machine's memory read bandwidth in bytes per second.

        The bandwidth is the median of five values. For each value, all threads together sum up 1 GiB of memory.
        """
        return median(self._gibibyte.nbytes / self._sum_seconds() for _ in range(5))

    def _sum_seconds(self) -> float:
        begin = time.perf_counter()
        self._gibibyte.sum()
        return time.perf_counter() - begin


def main() -> None:
    command = parser(__doc__)
    command.add_argument("--dtype", default="auto")
    command.add_argument("--quant", default="", help="format to which unquantized weights are quantized")
    command.add_argument("--activations", default="auto")
    command.add_argument("--kv-dtype", default="auto")
    command.add_argument("--tensor-parallel", type=int, default=1, help="ranks, each with --threads threads")
    command.add_argument("--repetition-penalty", type=float, default=1.0)
    arguments = command.parse_args()
    names = ("dtype", "quant", "activations", "kv_dtype", "threads", "tensor_parallel")
    wanted = {name: getattr(arguments, name) for name in names}
    if arguments.threads:
        torch.set_num_threads(arguments.threads)  # measures the bandwidth of memory
    try:
        # Without a limit on prompt tokens, few steps pass until all sequences decode, and the first of them stay short.
        options = msgspec.convert(wanted | {"speculation": False, "max_prefill_beside_decode": 0}, EngineOptions)
        engine = Engine(arguments.model, options, arguments.repetition_penalty)
    except (HelexaError, msgspec.ValidationError) as error:
        raise SystemExit(str(error)) from None
    engine.decode(Row.parse("decode@1"))  # warm up
    for row in arguments.rows:
        engine.measure(row)
    engine.close()


if __name__ == "__main__":
    main()
