"""A scheduler that writes a plan log for tests."""

import errno
import logging
import os
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import msgspec

from helexa.neuron.engine.ipc.messages import Cancel, Logprob, SamplingParams, TokenOutput
from helexa.neuron.engine.scheduling.plan import Plan
from helexa.neuron.engine.scheduling.scheduler import Scheduler
from helexa.neuron.engine.scheduling.sequence import Sequence
from helexa.neuron.engine.step_input_and_graph_sizes import Float32
from plan_log.records import Added, Failed, Finished, GrammarResult, Planned, Record, Setup, encode

_log = logging.getLogger("helexa.neuron.engine")

_MAX_BYTES = 256 << 20


class RecordedScheduler(Scheduler):
    """A scheduler that writes a plan log. The log contains all inputs and all plans of the scheduler.

    Args:
        folder: folder for the log file. The file name contains the time and the process id. Only the file's owner can
            read the file.

    Raises:
        OSError: the log file cannot be created.
    """

    def __init__(self, setup: Setup, folder: Path) -> None:
        super().__init__(*setup.arguments())
        self._principals = {"": ""}
        self._bytes_left = _MAX_BYTES
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.plans"
        self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        weakref.finalize(self, os.close, self._fd)
        _log.warning("writing a plan log of up to %d MiB path=%s", _MAX_BYTES >> 20, self.path)
        self._write(setup)

    def check(self, sequence: Sequence) -> TokenOutput | None:
        """Record the request of a new sequence, and check it as `Scheduler.check` does."""
        salt = self._principals.setdefault(sequence.principal, f"principal-{len(self._principals)}")
        request = msgspec.structs.replace(sequence.request, salt=salt, grammar="", sampling=SamplingParams())
        pooled, guided = sequence.pooled is not None, sequence.matcher is not None
        self._write(Added(request=request, pooled=pooled, guided=guided))
        return super().check(sequence)

    def cancel(self, sequence_id: int) -> bool:
        """Record the cancellation of a sequence, and cancel the sequence as `Scheduler.cancel` does."""
        self._write(Cancel(sequence_id))
        return super().cancel(sequence_id)

    def plan(self) -> Plan:
        """Return the plan of the next step, as `Scheduler.plan` does, and record the plan."""
        plan = super().plan()
        self._write(Planned.from_plan(plan, ahead=False))
        return plan

    def plan_after(self) -> Plan:
        """Return the plan of the step after the step in flight, as `Scheduler.plan_after` does, and record the plan."""
        plan = super().plan_after()
        self._write(Planned.from_plan(plan, ahead=True))
        return plan

    def commit(
        self,
        plan: Plan,
        sampled: list[int],
        seconds: float | None = None,
        logprobs: Mapping[int, Logprob] = MappingProxyType({}),
        hidden: Mapping[int, Float32] = MappingProxyType({}),
        scores: Mapping[int, list[Logprob]] = MappingProxyType({}),
    ) -> list[TokenOutput]:
        """Apply the results of a finished step, as `Scheduler.commit` does, and record the results."""
        matchers = {
            entry.sequence.id: (matcher, matcher.ahead)
            for entry in plan
            if entry.samples and entry.sequence.pages and (matcher := entry.sequence.matcher) is not None
        }
        outputs = super().commit(plan, sampled, seconds, logprobs, hidden, scores)
        token_counts = {output.id: len(output.tokens) for output in outputs}
        grammars = [
            GrammarResult(number, ahead, token_counts[number], matcher.ended, bool(matcher.error))
            for number, (matcher, ahead) in matchers.items()
        ]
        errors = {output.id for output in outputs if output.finish == "error"}
        not_finite = errors - {result.id for result in grammars if result.failed}
        record = Finished(sampled=sampled, seconds=seconds, grammars=grammars, not_finite=sorted(not_finite))
        self._write(record)
        return outputs

    def isolate(self, plan: Plan, error: str, after: Plan | None = None) -> list[TokenOutput]:
        """Record that a step failed, and handle the failure as `Scheduler.isolate` does."""
        self._write(Failed())
        return super().isolate(plan, error, after)

    def _write(self, record: Record) -> None:
        """Append a record to the log file.

        After a write error, or at the size limit of the file, the method logs a warning and records nothing more.
        """
        if not self._bytes_left:
            return
        frame = encode(record)
        self._bytes_left = max(self._bytes_left - len(frame), 0)
        try:
            if not self._bytes_left:
                raise OSError(errno.EFBIG, f"it has reached {_MAX_BYTES} bytes")
            if os.write(self._fd, frame) < len(frame):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            self._bytes_left = 0
            _log.warning("the plan log ends path=%s reason=%s", self.path, error.strerror)
