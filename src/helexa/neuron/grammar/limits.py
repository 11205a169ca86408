"""Limits on the cost of compiling a grammar, for the server, which checks grammars, and the engine, which uses them."""

MAX_BYTES = 1 << 19
"""Length limit of a grammar, in UTF-8 bytes."""

MAX_CPU_SECONDS = 1.0
"""CPU time limit of compiling a grammar."""

PARSER_LIMITS = {
    "max_items_in_row": 2000,
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 200_000,
    "verbose_errors": False,
}
"""Arguments of llguidance's `LLParserLimits`."""
