"""Check that the engine computes correct results on a GPU, and that scheduling does not change its answers.

    python perf/gpu/agreement.py
    python perf/gpu/agreement.py qwen3 qwen3_5-w4 --dtype float16
    python perf/gpu/agreement.py --device cpu --tiny

The models are small and have random weights; `CASES` lists them. The reference is plain torch in float32 on the CPU,
with the same quantized weights. A *spread* is the standard deviation of the reference's logits at one position. There
are three checks:

- `logits`: compares the logits of prompts and of greedy answers with the reference. Errors are in spreads. The
  permitted error is a multiple of the error that plain torch with the same dtype has on the same device.
- `tokens`: compares the tokens of greedy requests and of sampled requests with a seed. Requests that run alone must
  have the tokens of the reference. Requests in each scheduling variant (in a batch, preempted, with drafts and so on)
  must have the same tokens as the request alone.
- `quantized`: the device must quantize matrices to the same codes as the CPU.

A different token in the check `tokens` is not a failure if it is a near tie, that is, if rounding may have decided
between two tokens. The measure is the gap of the token in the reference. For greedy requests, the gap is the difference
between the best logit and the token's logit, in spreads. For sampled requests, it is the distance between the random
number and the token's interval of the cumulative distribution. The output has these keys:

    bound       largest gap of a near tie; a larger gap is a failure
    first       the first difference: request, position and both tokens
    worst       largest gap from the first difference on

A scheduling variant also fails if it had no effect (no overlapping step, no preempted sequence, and so on), or if KV
pages are not free at the end. Every line is JSON, and the last line has the verdict. The exit status is 1 if a check
failed.
"""

import argparse
import json
import logging
import sys
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from gpu_support import timing
from gpu_support.answers import LARGEST_STEP, Request, Results, Scheduling, answers, load, logits, logits_of
from gpu_support.random_models import AGREEING, TINY_AGREEING, DistinctModel
from torch import Tensor

from helexa.neuron.engine.execution.runner import Runner
from helexa.neuron.engine.ipc.engine_options import EngineOptions
from helexa.neuron.engine.ipc.messages import SamplingParams
from helexa.neuron.ops.sampling import uniforms
from helexa.neuron.weights.quantization_formats import QUANT_FORMATS
from helexa.neuron.weights.quantize import quantize

CASES: dict[str, tuple[str, str, Literal["auto", "int8"]]] = {
    "llama": ("llama", "", "auto"),
    "llama-w4": ("llama", "q4k", "auto"),
    "qwen3": ("qwen3", "", "auto"),
    "qwen3-kv8": ("qwen3", "", "int8"),
    "qwen3_moe": ("qwen3_moe", "", "auto"),
    "qwen3_moe-w4": ("qwen3_moe", "q4k", "auto"),
    "qwen3_5": ("qwen3_5", "", "auto"),
    "qwen3_5-w4": ("qwen3_5", "q4k", "auto"),
    "gpt_oss": ("gpt_oss", "", "auto"),
    "gemma3": ("gemma3", "", "auto"),
}
"""Architecture, quantization of weights, and dtype of the KV cache. Experts of gpt_oss are MXFP4."""

LENGTHS, TOKENS, CHUNK = (5, 45, 300, 700), 24, 100
"""Lengths of prompts, length of answers (most end on another KV page), and length of prompt chunks."""
TINY_LENGTHS, TINY_LONG, TINY_TOKENS, TINY_CHUNK = (3, 62, 65), 255, 4, 40
"""Smaller sizes for `--tiny`, and one more prompt length for logits only."""
TINY_SCHEDULINGS = (
    "guesses",
    "overlap",
    "recorded, preempted",
    "recorded, prefix",
    "recorded, overlap",
    "recorded, overlap, cut",
)
INTERPRETED = ("llama", "qwen3_moe", "qwen3_5")
"""Default scheduling variants and models for runs in Triton's interpreter, which is slow."""
SEQUENCES = 8
TEMPERATURE = 0.8

LARGEST, TYPICAL = 3.0, 2.0
"""Largest error and root-mean-square error of logits, relative to the error of plain torch."""
BYTES_OFF = 0.05
"""Permitted additional error, in spreads, of an 8-bit KV cache, which plain torch does not support."""
TIE, DRAW_TIE = 16.0, 2.0
"""Gaps below which two tokens count as nearly tied, in root-mean-square errors of plain torch's logits.

The logits of the best tokens have several times the error of other logits, since these tokens have the longest rows in
the head. For sampled tokens, the error of logits is divided by the temperature.
"""


def main() -> None:
    arguments = timing.arguments(__doc__, _add_arguments)
    logging.basicConfig(format="%(message)s", stream=sys.stderr)
    report = Report()
    if torch.device(arguments.device).type == "cuda":
        report.line("", "device", True, name=torch.cuda.get_device_name(), torch=torch.__version__)
    with report.failing("", "quantized"):
        quantized(torch.device(arguments.device), report)
    for name in arguments.models or (INTERPRETED if arguments.device == "cpu" else CASES):
        with report.failing(name, "all"):
            Agreement(name, arguments, report).check()
    report.verdict()


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "models", nargs="*", choices=[*CASES, []], help="all if none is named, or a few on a CPU", metavar="model"
    )
    parser.add_argument("--no-graphs", action="store_true", help="without recorded steps, as memory checkers need it")


class Report:
    """Prints the result line of each check, and records which checks failed."""

    def __init__(self) -> None:
        self._checks, self._ties = 0, 0
        self._failed: list[str] = []

    def line(self, model: str, check: str, passed: bool, **figures: Any) -> None:
        """Print the result line of a check, and record the check if it failed."""
        self._checks += 1
        self._ties += figures.get("near_ties", 0)
        if not passed:
            self._failed.append(" ".join(str(item) for item in (model, check, figures.get("variant", "")) if item))
        shown = {name: _rounded(value) for name, value in figures.items()}
        print(json.dumps({"model": model, "check": check, "held": passed, **shown}), flush=True)

    def failing(self, model: str, check: str, **figures: Any) -> "_Failing":
        """Return a context manager that suppresses an exception in its block and reports it as a failed check."""
        return _Failing(self, model, check, figures)

    def verdict(self) -> None:
        """Print the line with the verdict over all checks. Exit with status 1 if a check failed."""
        verdict = "failed" if self._failed else "held"
        line = {"verdict": verdict, "checks": self._checks, "near_ties": self._ties, "failed": self._failed}
        print(json.dumps(line), flush=True)
        if self._failed:
            raise SystemExit(1)


@dataclass
class _Failing:
    report: Report
    model: str
    check: str
    figures: dict[str, Any]

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> bool:
        if not isinstance(error, Exception):
            return False
        traceback.print_exception(error)
        generated = f"{type(error).__name__}: {error}".partition("\n")[0]
        self.report.line(self.model, self.check, False, **self.figures, error=generated)
        return True


@dataclass(frozen=True)
class LogitErrors:
    """Differences between the logits of an engine and of the reference (plain torch in float32).

    Attributes:
        largest: largest absolute error, in standard deviations of the reference's logits at the same position.
        typical: root-mean-square error in the same unit.
        argmax: share of positions at which engine and reference have the same best token.
        spread: average standard deviation of the reference's logits at one position.
    """

    largest: float
    typical: float
    argmax: float
    spread: float

    @classmethod
    def between(cls, actual: Iterable[Tensor], reference: Iterable[Tensor]) -> "LogitErrors":
        """Return the errors of the logits `actual`. Each item has the logits [tokens, vocabulary] of one sequence."""
        rows, expected = torch.cat(list(actual)).double(), torch.cat(list(reference)).double()
        spreads = expected.std(-1, keepdim=True)
        errors = ((rows - expected) / spreads).nan_to_num(1e9)  # NaN exceeds every bound
        same = (rows.argmax(-1) == expected.argmax(-1)).double().mean()
        return cls(float(errors.abs().max()), float(errors.square().mean().sqrt()), float(same), float(spreads.mean()))


class Agreement:
    """The checks of one model, which compare the engine with and without captured graphs with the reference."""

    def __init__(self, name: str, arguments: argparse.Namespace, report: Report) -> None:
        self._name, self._report = name, report
        kind, quant, kv_dtype = CASES[name]
        self._tiny = tiny = arguments.tiny
        model = DistinctModel((TINY_AGREEING if tiny else AGREEING)[kind], quant)
        shared: dict[str, Any] = {"kv_cache_mb": 16 if tiny else 64, "snapshot_mb": 4 if tiny else 64}
        shared |= {"max_sequences": SEQUENCES, "max_step_tokens": LARGEST_STEP, "context_length": 1024}
        self._reference = load(model, EngineOptions(dtype="float32", kernels="torch", **shared), "torch")
        shared |= {"device": arguments.device, "dtype": arguments.dtype}
        self._plain_torch = load(model, EngineOptions(kernels="torch", **shared), "torch")
        engine = EngineOptions(kernels="triton", kv_dtype=kv_dtype, graphs=False, **shared)
        self._runners = {False: load(model, engine, "triton")}
        if not arguments.no_graphs:
            self._runners[True] = load(model, EngineOptions(kernels="triton", kv_dtype=kv_dtype, **shared), "triton")
        self._allowance = BYTES_OFF if kv_dtype == "int8" else 0.0
        self._chunk = TINY_CHUNK if tiny else CHUNK
        lengths, self._tokens = (TINY_LENGTHS, TINY_TOKENS) if tiny else (LENGTHS, TOKENS)
        long = tiny and arguments.device != "cpu"  # too slow in Triton's interpreter
        generator, vocabulary = torch.Generator().manual_seed(2), model.config["vocab_size"]
        self._prompts = [torch.randint(vocabulary, (length,), generator=generator).tolist() for length in lengths]
        self._long = [torch.randint(vocabulary, (TINY_LONG,), generator=generator).tolist()] if long else []
        self._off = LogitErrors(0.0, 0.0, 1.0, 1.0)

    def check(self) -> None:
        """Run all checks of the model and print their results."""
        self._logits()
        greedy = [Request(prompt, self._tokens) for prompt in self._prompts]
        self._check_tokens(greedy, "greedy", self._schedulings())
        params = [SamplingParams(temperature=TEMPERATURE, seed=7 * number) for number in range(len(greedy))]
        seeded = [replace(request, sampling=param) for request, param in zip(greedy, params, strict=True)]
        schedulings = {
            "overlap": Scheduling(overlap=True),
            "recorded, overlap": Scheduling(captured=True, overlap=True),
        }
        if not self._tiny:
            schedulings |= {"together": Scheduling(), "guesses": Scheduling(drafts=True)}
        elif True in self._runners:
            del schedulings["overlap"]
        self._check_tokens(seeded, "seeded", schedulings, others=greedy[:2])

    def _schedulings(self) -> dict[str, Scheduling]:
        schedulings = {
            "together": Scheduling(),
            "cut": Scheduling(step_tokens=self._chunk),
            "preempted": Scheduling(few_pages=True),
            "prefix": Scheduling(reuse_prefixes=True),
            "guesses": Scheduling(drafts=True),
            "overlap": Scheduling(overlap=True),
        }
        captured = {f"recorded, {name}": replace(scheduling, captured=True) for name, scheduling in schedulings.items()}
        overlapping = {
            f"recorded, overlap, {name}": replace(schedulings[name], captured=True, overlap=True)
            for name in ("cut", "preempted", "prefix")
        }
        if self._tiny and True in self._runners:
            actual = schedulings | captured | overlapping
            return {name: actual[name] for name in TINY_SCHEDULINGS}
        return schedulings | {"recorded, alone": Scheduling(captured=True, batched=False)} | captured | overlapping

    def _logits(self) -> None:
        """Compute the permitted errors from plain torch on the same device, then check the engine's logits."""
        one_at_a_time = Scheduling(batched=False)

        def errors(runner: Runner, scheduling: Scheduling) -> LogitErrors:
            prompts = self._prompts + (self._long if scheduling == one_at_a_time else [])
            requests = [Request(prompt, self._tokens) for prompt in prompts]
            tokens, actual = logits(runner, requests, scheduling)
            return LogitErrors.between(
                actual, [self._wanted(*request) for request in zip(prompts, tokens, strict=True)]
            )

        baseline = errors(self._plain_torch, one_at_a_time)
        self._report.line(self._name, "plain torch", True, **vars(baseline))
        self._off = replace(baseline, typical=baseline.typical + self._allowance / 2)
        bounds = LARGEST * baseline.largest + 4 * self._allowance, TYPICAL * baseline.typical + self._allowance
        schedulings = {
            "alone": one_at_a_time,
            "cut": Scheduling(step_tokens=self._chunk),
            "recorded": Scheduling(captured=True),
        }
        if self._tiny and True in self._runners:
            del schedulings["cut"]
        for name, scheduling in schedulings.items():
            if scheduling.captured not in self._runners:
                continue
            with self._report.failing(self._name, "logits", variant=name):
                actual = errors(self._runners[scheduling.captured], scheduling)
                passed = actual.largest <= bounds[0] and actual.typical <= bounds[1]
                self._report.line(self._name, "logits", passed, variant=name, **vars(actual), bounds=bounds)

    def _check_tokens(
        self,
        requests: list[Request],
        kind: str,
        schedulings: dict[str, Scheduling],
        others: Sequence[Request] = (),
    ) -> None:
        """Check the tokens of `requests`: first of each request alone, then in all scheduling variants.

        Args:
            requests: the requests to check.
            kind: name of the kind of requests in the output, `greedy` or `seeded`.
            schedulings: the scheduling variants by name.
            others: more requests that run in the same batches and are not checked.
        """
        baseline = answers(self._runners[False], requests, Scheduling(batched=False)).tokens
        reference = [
            self._reference_tokens(request, tokens) for request, tokens in zip(requests, baseline, strict=True)
        ]
        self._report_tokens(requests, reference, Results(baseline), Scheduling(batched=False), f"{kind}, alone")
        stops = [
            replace(request, stop_ids=[tokens[len(tokens) // 2]])
            for request, tokens in zip(requests, baseline, strict=True)
        ]
        cut = [tokens[: tokens.index(request.stop_ids[0]) + 1] for request, tokens in zip(stops, baseline, strict=True)]
        tasks = [(name, scheduling, [*requests, *others], baseline) for name, scheduling in schedulings.items()]
        tasks += [
            (f"{name}, ends", schedulings[name], stops, cut)
            for name in ("overlap", "recorded, overlap")
            if name in schedulings
        ]
        for name, scheduling, task_requests, expected in tasks:
            if scheduling.captured not in self._runners:
                continue
            with self._report.failing(self._name, "tokens", variant=f"{kind}, {name}"):
                results = answers(self._runners[scheduling.captured], task_requests, scheduling, expected)
                self._report_tokens(task_requests[: len(requests)], expected, results, scheduling, f"{kind}, {name}")

    def _report_tokens(
        self, requests: list[Request], reference: list[list[int]], results: Results, scheduling: Scheduling, name: str
    ) -> None:
        """Print whether the tokens in `results` equal the tokens `reference`, and the gaps of different tokens."""
        gaps: list[float] = []
        figures: dict[str, Any] = {}
        bound = self._bound(requests[0])
        for number, (request, right, generated) in enumerate(zip(requests, reference, results.tokens, strict=False)):
            if generated == right:
                continue
            place = next((n for n, (a, b) in enumerate(zip(generated, right, strict=False)) if a != b), None)
            if place is None or (len(generated) != len(right) and not request.stop_ids):
                figures["lengths"] = [
                    len(generated),
                    len(right),
                ]  # one answer is a prefix of the other: always an error
                gaps.append(1e9)
                continue
            pair = generated[place], right[place]
            row = self._wanted(request.prompt, generated)[place]
            gap = max(self._gap(request, place, row, token) for token in pair)
            first = {"request": number, "place": place, "tokens": pair, "gap": _rounded(gap)}
            figures.setdefault("first", first)
            gaps += [gap, *self._gaps(request, generated)[place + 1 :]]
        lacking = [name for name in scheduling.expected_counters if not getattr(results, name)]
        if lacking:
            figures["lacking"] = lacking
        worst = max(gaps, default=0.0)
        if gaps:
            figures["worst"] = worst
        passed = worst <= bound and not lacking and not results.leaked
        differing = sum(generated != right for generated, right in zip(results.tokens, reference, strict=False))
        ties = differing if passed else 0
        counts = {"same": len(reference) - differing, "of": len(reference), "near_ties": ties, "bound": bound}
        self._report.line(self._name, "tokens", passed, variant=name, **counts, **figures, **results.counts)

    def _reference_tokens(self, request: Request, tokens: list[int]) -> list[int]:
        """Return the token that the reference chooses at each position after the prompt and the earlier `tokens`."""
        rows = self._wanted(request.prompt, tokens)
        if request.sampling.temperature == 0:
            return rows.argmax(-1).tolist()
        return [_drawn(row, self._number(request, place)) for place, row in enumerate(rows)]

    def _gaps(self, request: Request, tokens: list[int]) -> list[float]:
        rows = self._wanted(request.prompt, tokens)
        return [self._gap(request, n, row, token) for n, (row, token) in enumerate(zip(rows, tokens, strict=True))]

    def _gap(self, request: Request, place: int, row: Tensor, token: int) -> float:
        """Return the gap of `token` (see the module) at position `place` of the response to `request`.

        Args:
            request: the request.
            place: position of the token in the response.
            row: the reference's logits at this position.
            token: a token id.
        """
        if request.sampling.temperature == 0:
            return float((row.max() - row[token]) / row.std())
        ends = _shares(row)
        number = self._number(request, place)
        begin = float(ends[token - 1]) if token else 0.0
        return max(begin - number, number - float(ends[token]), 0.0)

    def _number(self, request: Request, place: int) -> float:
        seed, position = np.array([request.sampling.seed], np.uint64), np.array([len(request.prompt) + place])
        return float(uniforms(seed, position)[0])

    def _bound(self, request: Request) -> float:
        if request.sampling.temperature == 0:
            return TIE * self._off.typical
        return DRAW_TIE * self._off.typical * self._off.spread / TEMPERATURE

    def _wanted(self, prompt: list[int], tokens: list[int]) -> Tensor:
        return logits_of(self._reference, prompt, tokens)


def quantized(device: torch.device, report: Report) -> None:
    """Check that quantization on the device produces almost the same codes as on the CPU, in all formats."""
    weight = torch.randn(64, 1024, generator=torch.Generator().manual_seed(3))
    for name, form in QUANT_FORMATS.items():
        on_device, on_cpu = quantize(weight.to(device), form), quantize(weight, form)
        if on_device is None or on_cpu is None:
            raise RuntimeError(f"{name}: the matrix cannot be quantized")
        same = float((on_device.codes.cpu() == on_cpu.codes).double().mean())
        errors = float((on_device.to(torch.device("cpu")).dequantize() - on_cpu.dequantize()).square().mean().sqrt())
        report.line("", "quantized", same > 0.999 and errors < 1e-3, form=name, same=same, off=errors)


def _shares(row: Tensor) -> Tensor:
    """Return the cumulative probabilities of the logits `row` at `TEMPERATURE`, each including its own token.

    `row` and the result have the shape [V] (V vocabulary entries).
    """
    return (row.double() / TEMPERATURE).softmax(-1).cumsum(-1)


def _drawn(row: Tensor, number: float) -> int:
    return min(int(torch.searchsorted(_shares(row), number, right=True)), len(row) - 1)


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.4g}")
    return [_rounded(request) for request in value] if isinstance(value, tuple) else value


if __name__ == "__main__":
    main()
