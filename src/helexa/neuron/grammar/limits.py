"""How much a grammar may cost, the same where it is checked and where it is used."""

MAX_BYTES = 1 << 19
"""A grammar's length in UTF-8."""

MAX_CPU_SECONDS = 1.0
"""That compiling one may take."""

PARSER_LIMITS = {
    "max_items_in_row": 2000,
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 200_000,
    "verbose_errors": False,
}
"""The arguments of llguidance's `LLParserLimits`."""
