"""Limits on the cost of compiling a grammar, and the result of a compilation.

The server, which checks grammars, and the engine, which uses them, have the same limits.
"""

import msgspec

MAX_BYTES = 1 << 19  # length limit of a grammar, in UTF-8 bytes

MAX_CPU_SECONDS = 1.0  # CPU time limit of compiling a grammar

# Arguments of llguidance's `LLParserLimits`.
PARSER_LIMITS = {
    "max_items_in_row": 2000,
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 200_000,
    "verbose_errors": False,
}


class CompileResult(msgspec.Struct, frozen=True):
    """Result of compiling one grammar."""

    error: str = ""  # the compiler's error; empty for a valid grammar
    rule: str = ""  # name of the JSON Schema in the grammar that causes the error; empty if unknown
    pointer: str = ""  # JSON pointer of the error within this JSON Schema; empty if unknown
