"""The result of one check."""

from typing import Literal, NamedTuple

Level = Literal["fine", "note", "fault"]


class Finding(NamedTuple):
    """The result of one check, in one sentence.

    Attributes:
        topic: subject of the check.
        level: `fault` prevents serving the configured models, `note` is a possible improvement.
        text: the finding, and how to fix the problem.
    """

    topic: str
    level: Level
    text: str
