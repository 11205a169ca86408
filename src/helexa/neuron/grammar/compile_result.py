"""Result of compiling a grammar."""

import msgspec


class CompileResult(msgspec.Struct, frozen=True):
    """Result of compiling one grammar.

    Attributes:
        error: the compiler's error; empty for a valid grammar.
        rule: name of the JSON Schema in the grammar that causes the error; empty if unknown.
        pointer: JSON pointer of the error within this JSON Schema; empty if unknown.
    """

    error: str = ""
    rule: str = ""
    pointer: str = ""
