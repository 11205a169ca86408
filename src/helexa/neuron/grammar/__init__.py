"""Build grammars that constrain a model's output, in llguidance's format, and check that a grammar compiles.

A grammar is JSON text in llguidance's format. The engine compiles the grammar and masks the tokens that the grammar
forbids. Building a grammar has no side effects.
"""

from helexa.neuron.grammar.answer import for_choice, for_lark, for_regex, for_schema
from helexa.neuron.grammar.checker import GrammarChecker
from helexa.neuron.grammar.reasoning import after_reasoning, in_final_channel
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
