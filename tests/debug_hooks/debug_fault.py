"""Fault injection for tests: an engine process executes the faults in the environment variable `TEST_ENGINE_FAULTS`.

The variable lists faults of the form `[MODEL:][rankN/]KIND@WHEN`, separated by commas. A fault with MODEL affects only
models whose path contains MODEL. A fault with `rankN/` occurs in the process of rank N, other faults occur in rank 0.
KIND is:

    exit   ends the process             hang   never ends the step
    stall  never ends a native kernel   (CPU only)
    slow   adds a second to the step    crawl  adds three seconds to the step, with progress reports
    oom    raises out of memory         fault  raises a device error
    error  raises an error of the step  nan    sets the logits of a sequence to NaN; in ranks after rank 0, sets the
                                               first KV page of the step to NaN before the step
    refuse raises the error of an operation that cannot be captured as a graph

WHEN is:

    load        while the model loads, after its first bytes (every KIND but nan and refuse)
    capture     when the first graph is captured (every KIND but nan)
    step=N      in the Nth step of the process
    every=N     in every Nth step
    token=N     in steps of a sequence that has this token in its KV pages
    file=PATH   in the next step after the file exists; the step removes the file
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast, get_args

import numpy as np

from helexa.core.errors import HelexaError
from helexa.neuron import tensors
from helexa.neuron.engine.execution.runner import Runner
from helexa.neuron.engine.step_input_and_graph_sizes import StepInput
from helexa.neuron.ops.batch import Batch
from helexa.neuron.ops.kernel_header import PAGE_SIZE, RANK_STATE_BYTES
from helexa.neuron.ops.native.kernel_library import native_kernels
from helexa.neuron.processes import heartbeat
from helexa.neuron.tensors import Tensor
from injection import FAULTS

Kind = Literal["exit", "hang", "stall", "slow", "crawl", "oom", "fault", "error", "nan", "refuse"]

_SLOW_SECONDS = 1.0
_CRAWL_PIECES = 60
_CRAWL_PIECE_SECONDS = 0.05
_EXIT_CODE = 77


@dataclass(frozen=True)
class Fault:
    """One injected fault.

    Attributes:
        kind: what the fault does, for example `exit`.
        when: kind of the condition under which the fault occurs, for example `step`.
        argument: argument of the condition, for example the number of the step; empty for `load` and `capture`.
        rank: number of the rank in whose process the fault occurs.
    """

    kind: Kind
    when: str
    argument: str
    rank: int = 0

    @classmethod
    def parse(cls, text: str) -> "Fault":
        """Return the fault that `text` describes, in the form `[rankN/]KIND@WHEN`.

        Raises:
            HelexaError: `text` does not have this form.
        """
        place, slash, fault = text.rpartition("/") if "/" in text.partition("@")[0] else ("", "", text)
        rank = place.removeprefix("rank") if slash else "0"
        kind, _, trigger = fault.partition("@")
        when, _, argument = trigger.partition("=")
        numbered = when in ("step", "every", "token") and argument.isdecimal() and int(argument) > 0
        unnumbered = (when == "load" and kind not in ("nan", "refuse")) or (when == "capture" and kind != "nan")
        is_valid = numbered or (unnumbered and not argument) or (when == "file" and argument)
        if kind not in get_args(Kind) or not is_valid or not rank.isdecimal():
            raise HelexaError(f"{FAULTS}: '{text}' is not a fault; use [MODEL:][rankN/]KIND@WHEN")
        return cls(cast(Kind, kind), when, argument, int(rank))

    def due(self, number: int, marked: bool) -> bool:
        """Return whether the fault occurs in this step.

        Args:
            number: number of the step in this process, starting at 1.
            marked: whether the KV pages of a sequence in the step contain the token of a fault `token=N`.
        """
        match self.when:
            case "step":
                return number == int(self.argument)
            case "every":
                return number % int(self.argument) == 0
            case "token":
                return marked
            case "file":
                try:
                    Path(self.argument).unlink()
                except OSError:
                    return False
                return True
        return False

    def strike(self) -> None:
        """Execute the fault. For a `nan` fault this does nothing, because `Faults.afflict` sets the logits to NaN."""
        match self.kind:
            case "exit":
                raise SystemExit(_EXIT_CODE)
            case "hang":
                while True:
                    time.sleep(60)
            case "stall":
                _stall()
            case "slow":
                time.sleep(_SLOW_SECONDS)
            case "crawl":
                for _ in range(_CRAWL_PIECES):
                    time.sleep(_CRAWL_PIECE_SECONDS)
                    heartbeat.beat()
            case "oom":
                raise tensors.OutOfMemoryError("injected: out of memory")
            case "fault":
                raise tensors.AcceleratorError("injected: device error")
            case "error":
                raise ValueError("injected: error")
            case "refuse":
                raise RuntimeError("injected: operation not permitted when stream is capturing")


def _stall() -> None:
    """Run a graph in whose first kernel a thread waits for a rank that does not exist."""
    library = native_kernels()
    shared = tensors.zeros(RANK_STATE_BYTES, dtype=tensors.uint8)
    library.run(2 * library.instruction("meet_ranks", {"shared": shared, "rank": 0, "ranks": 2}))


class Faults:
    """The injected faults of one engine process. If the list is empty, steps run unchanged."""

    def __init__(self, faults: list[Fault]) -> None:
        self._faults = faults
        self._step = 0
        self._loaded = False

    @classmethod
    def from_environment(cls, model: Path, environ: Mapping[str, str], rank: int = 0) -> "Faults":
        """Return the faults for `model` in the process of rank `rank` that `TEST_ENGINE_FAULTS` in `environ` lists.

        Raises:
            HelexaError: `TEST_ENGINE_FAULTS` contains an invalid fault.
        """
        faults: list[Fault] = []
        for text in filter(None, environ.get(FAULTS, "").split(",")):
            name, colon, fault = text.rpartition(":") if ":" in text.partition("@")[0] else ("", "", text)
            if not colon or name in str(model):
                faults.append(Fault.parse(fault))
        return cls([fault for fault in faults if fault.rank == rank])

    def loading(self) -> None:
        """Execute the faults that occur during loading (`WHEN` is `load`). Only the first call has an effect."""
        if not self._loaded:
            self._loaded = True
            for fault in self._faults:
                if fault.when == "load":
                    fault.strike()

    def afflict(self, runner: Runner) -> None:
        """Replace `runner.compute` and `runner.ops.capture` by functions that also execute the faults."""
        if not self._faults:
            return
        compute, capture = runner.compute, runner.ops.capture
        marks = {fault: MarkedPages(int(fault.argument)) for fault in self._faults if fault.when == "token"}

        def struck(step: StepInput, last: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
            self._step += 1
            marked = {fault: pages.spans(step) for fault, pages in marks.items()}
            due = [fault for fault in self._faults if fault.due(self._step, any(marked.get(fault, ())))]
            for fault in due:
                fault.strike()
                if fault.kind == "nan" and fault.rank:
                    for cache in runner._by_page(windowed=False):
                        # 255: NaN in bfloat16 and in float32
                        cache[step.pages[0, 0]] = 255 if cache.dtype == tensors.uint8 else tensors.nan
            logits, hidden = compute(step, last)
            for fault in due:
                if fault.kind == "nan" and not fault.rank and step.samples:
                    spans = np.searchsorted(step.starts, step.sample_rows[: step.samples], side="right") - 1
                    affected_rows = [marked[fault][span] for span in spans] if fault in marked else spans == spans[0]
                    logits[tensors.tensor(affected_rows, device=logits.device)] = tensors.nan
            return logits, hidden

        def refused(forward: Callable[[Batch], Tensor], blank: Batch) -> None:
            for fault in self._faults:
                if fault.when == "capture":
                    fault.strike()
            capture(forward, blank)

        runner.compute = struck
        if any(fault.when == "capture" for fault in self._faults):
            runner.ops.capture = refused


class MarkedPages:
    """Tracks which KV pages contain the token of a fault `token=N`. It must receive the input of every step."""

    def __init__(self, token: int) -> None:
        self._token = token
        self._pages: set[int] = set()

    def spans(self, step: StepInput) -> list[bool]:
        """Return, for each sequence of `step`, whether one of the sequence's KV pages contains the token."""
        pages = step.slots // PAGE_SIZE
        self._pages -= set(pages[step.slots % PAGE_SIZE == 0].tolist())  # reused from their first position on
        self._pages |= set(pages[step.tokens == self._token].tolist())
        page_counts = -(-(step.prefixes + np.diff(step.starts)) // PAGE_SIZE)
        return [
            not self._pages.isdisjoint(row[:count]) for row, count in zip(step.pages.tolist(), page_counts, strict=True)
        ]
