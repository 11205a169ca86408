"""Build and check grammars that constrain a model's output.

A grammar is JSON text in llguidance's format. The engine compiles the grammar and masks the tokens that it forbids.
"""

from helexa.neuron.grammar.answer import after_reasoning, for_choice, for_lark, for_regex, for_schema, in_final_channel
from helexa.neuron.grammar.checker import GrammarChecker
from helexa.neuron.grammar.tools import for_tools

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
