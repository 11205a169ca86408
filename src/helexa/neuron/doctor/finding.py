"""The result of one check of `neuron doctor`."""

from typing import Literal, NamedTuple

Level = Literal["fine", "note", "fault"]


class Finding(NamedTuple):
    """The result of one check of `neuron doctor`, in one sentence.

    Attributes:
        topic: subject of the check.
        level: `fault` if the problem prevents serving the configured models, `note` if an improvement is possible,
            `fine` if there is no problem.
        text: the finding, and how to fix the problem.
    """

    topic: str
    level: Level
    text: str
