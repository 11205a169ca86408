"""Result of compiling a grammar."""

import msgspec


class Verdict(msgspec.Struct, frozen=True):
    """`error` is empty for a valid grammar. `part` and `pointer` locate the error if known."""

    error: str = ""
    part: str = ""
    pointer: str = ""
