"""What one look found."""

from typing import Literal, NamedTuple

Level = Literal["fine", "note", "fault"]


class Finding(NamedTuple):
    """One sentence.

    Attributes:
        topic: what was looked at.
        level: `fault` keeps models from being served as configured, `note` could be better.
        text: what was found, and what to do about it.
    """

    topic: str
    level: Level
    text: str
