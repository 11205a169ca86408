"""What came of compiling a grammar."""

import msgspec


class Verdict(msgspec.Struct, frozen=True):
    """`error` is empty if it compiles; `part` and `pointer` say where it does not, if that is known."""

    error: str = ""
    part: str = ""
    pointer: str = ""
