"""The result of one check of `neuron doctor`."""

from typing import Literal, NamedTuple

Level = Literal["fine", "note", "fault"]


class CheckResult(NamedTuple):
    """The result of one check of `neuron doctor`.

    Attributes:
        topic: subject of the check, for example `disk` or `kernels`.
        level: `fault` if the problem prevents serving the configured models, `note` if an improvement is possible,
            `fine` if there is no problem.
        text: one sentence that describes the result and, if there is a problem, how to fix it.
    """

    topic: str
    level: Level
    text: str
