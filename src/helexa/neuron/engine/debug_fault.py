"""Faults on purpose, for drills: what `NEURON_DEBUG_FAULT` asks for, an engine process does to itself.

The variable holds any number of `[MODEL:]KIND@WHEN`, separated by commas; MODEL is a part of the model's path. KIND:

    exit   ends the process        hang   never ends the step      slow   makes the step take a second longer
    crawl  makes the step take three seconds longer, in which it reports progress
    oom    runs out of memory      fault  is a device's fault      error  raises what is nobody's fault but the step's
    nan    makes logits of one sequence no numbers

and WHEN:

    load        while the model loads, after its first bytes (exit, hang, slow, crawl, oom, fault, error)
    step=N      in the Nth step of the process
    every=N     in every Nth step
    token=N     in steps of a sequence in whose KV pages this token is
    file=PATH   in the next step after there is such a file, which is removed
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast, get_args

import numpy as np
import torch
from torch import Tensor

from helexa.core.errors import HelexaError
from helexa.neuron.engine.execution.runner import Runner
from helexa.neuron.engine.ipc.messages import DEBUG_FAULT
from helexa.neuron.engine.step.step_input import StepInput
from helexa.neuron.ops.constants import PAGE_SIZE
from helexa.neuron.processes import heartbeat

Kind = Literal["exit", "hang", "slow", "crawl", "oom", "fault", "error", "nan"]

_SLOW_SECONDS = 1.0
_CRAWL_PIECES = 60
_CRAWL_PIECE_SECONDS = 0.05
_EXIT_CODE = 77


@dataclass(frozen=True)
class Fault:
    """One fault: what, and when."""

    kind: Kind
    when: str
    argument: str

    @classmethod
    def parse(cls, text: str) -> "Fault":
        """Read `KIND@WHEN`.

        Raises:
            HelexaError: it is none.
        """
        kind, _, place = text.partition("@")
        when, _, argument = place.partition("=")
        numbered = when in ("step", "every", "token") and argument.isdecimal() and int(argument) > 0
        sound = numbered or (when == "load" and not argument and kind != "nan") or (when == "file" and argument)
        if kind not in get_args(Kind) or not sound:
            raise HelexaError(f"{DEBUG_FAULT}: '{text}' is no fault")
        return cls(cast(Kind, kind), when, argument)

    def due(self, number: int, marked: bool) -> bool:
        """Whether step `number`, from 1, is to suffer it.

        Args:
            marked: a sequence of the step has the fault's token.
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
        """Do it; `nan` is done to the logits."""
        match self.kind:
            case "exit":
                raise SystemExit(_EXIT_CODE)
            case "hang":
                while True:
                    time.sleep(60)
            case "slow":
                time.sleep(_SLOW_SECONDS)
            case "crawl":
                for _ in range(_CRAWL_PIECES):
                    time.sleep(_CRAWL_PIECE_SECONDS)
                    heartbeat.beat()
            case "oom":
                raise torch.OutOfMemoryError("no memory, on purpose")
            case "fault":
                raise torch.AcceleratorError("a device's fault, on purpose")
            case "error":
                raise ValueError("an error, on purpose")


class Faults:
    """The faults of one engine process; none, and nothing is in the way of its steps."""

    def __init__(self, faults: list[Fault]) -> None:
        self._faults = faults
        self._step = 0
        self._loaded = False

    @classmethod
    def of(cls, model: Path, environ: Mapping[str, str]) -> "Faults":
        """Those that the environment asks for.

        Raises:
            HelexaError: it asks for what there is not.
        """
        faults: list[Fault] = []
        for text in filter(None, environ.get(DEBUG_FAULT, "").split(",")):
            name, colon, fault = text.rpartition(":") if ":" in text.partition("@")[0] else ("", "", text)
            if not colon or name in str(model):
                faults.append(Fault.parse(fault))
        return cls(faults)

    def loading(self) -> None:
        """Strike once while the model loads."""
        if not self._loaded:
            self._loaded = True
            for fault in self._faults:
                if fault.when == "load":
                    fault.strike()

    def afflict(self, runner: Runner) -> None:
        """Have the runner's forward passes struck by what is due."""
        if not self._faults:
            return
        compute = runner.compute
        marks = {fault: MarkedPages(int(fault.argument)) for fault in self._faults if fault.when == "token"}

        def struck(step: StepInput, last: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
            self._step += 1
            marked = {fault: pages.spans(step) for fault, pages in marks.items()}
            due = [fault for fault in self._faults if fault.due(self._step, any(marked.get(fault, ())))]
            for fault in due:
                fault.strike()
            logits, hidden = compute(step, last)
            for fault in due:
                if fault.kind == "nan" and step.samples:
                    spans = np.searchsorted(step.starts, step.sample_rows[: step.samples], side="right") - 1
                    spoilt = [marked[fault][span] for span in spans] if fault in marked else spans == spans[0]
                    logits[torch.tensor(spoilt, device=logits.device)] = torch.nan
            return logits, hidden

        runner.compute = struck


class MarkedPages:
    """The pages that hold a token, known from the steps that have filled them."""

    def __init__(self, token: int) -> None:
        self._token = token
        self._pages: set[int] = set()

    def spans(self, step: StepInput) -> list[bool]:
        """Which spans of a step have such a page."""
        pages = step.slots // PAGE_SIZE
        self._pages -= set(pages[step.slots % PAGE_SIZE == 0].tolist())  # begun anew
        self._pages |= set(pages[step.tokens == self._token].tolist())
        used = -(-(step.prefixes + np.diff(step.starts)) // PAGE_SIZE)
        return [not self._pages.isdisjoint(own[:count]) for own, count in zip(step.pages.tolist(), used, strict=True)]
