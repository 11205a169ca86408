"""Grammars that keep an answer to a form, as llguidance reads them, and the check that one can be compiled.

A grammar is a string, llguidance's JSON; the engine makes it a mask over the vocabulary. Building one is pure.
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
