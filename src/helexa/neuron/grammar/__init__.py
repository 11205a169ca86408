"""Build and check grammars that constrain a model's output.

A grammar is JSON text in llguidance's format. The engine compiles the grammar and masks the tokens that it forbids.
"""

from helexa.neuron.grammar.grammar_check_and_rejection import GrammarChecker
from helexa.neuron.grammar.output_with_calls import for_tools
from helexa.neuron.grammar.whole_output import (
    after_reasoning,
    for_choice,
    for_lark,
    for_regex,
    for_schema,
    in_final_channel,
)

__all__ = [
    "GrammarChecker",
    "after_reasoning",
    "for_choice",
    "for_lark",
    "for_regex",
    "for_schema",
    "for_tools",
    "in_final_channel",
]
