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
    token=N     in steps of a sequence that has this token
    file=PATH   in the next step after there is such a file, which is removed
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast, get_args

import torch
from torch import Tensor

from helexa.core.errors import HelexaError
from helexa.neuron import heartbeat
from helexa.neuron.engine.messages import DEBUG_FAULT
from helexa.neuron.engine.plan import Plan
from helexa.neuron.engine.runner import Runner

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

    def due(self, step: int, plan: Plan) -> bool:
        """Whether the step number `step`, from 1, is to suffer it."""
        match self.when:
            case "step":
                return step == int(self.argument)
            case "every":
                return step % int(self.argument) == 0
            case "token":
                return any(int(self.argument) in entry.sequence.tokens for entry in plan)
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

        def struck(plan: Plan, last: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
            self._step += 1
            due = [fault for fault in self._faults if fault.due(self._step, plan)]
            for fault in due:
                fault.strike()
            logits, hidden = compute(plan, last)
            for fault in due:
                if fault.kind == "nan":
                    _spoil(logits, plan, fault)
            return logits, hidden

        runner.compute = struck


def _spoil(logits: Tensor, plan: Plan, fault: Fault) -> None:
    """Make rows of one sequence, or of those with the token, no numbers."""
    row = 0
    for entry in plan:
        rows = len(entry.drafts) + 1 if entry.samples else 0
        if rows and (fault.when != "token" or int(fault.argument) in entry.sequence.tokens):
            logits[row : row + rows] = torch.nan
            if fault.when != "token":
                return
        row += rows
