"""Extends a grammar of constrained output so that the model may first reason without constraints."""

from helexa.neuron.grammar.rules import Rules, TokenId, without
from helexa.neuron.parsers.formats.choice import TOOL_CALL_FORMATS
from helexa.neuron.parsers.reasoning import ReasoningMarks

_MARGIN = r"/\n{0,2}/"
"""Lark expression of the text between the reasoning and the constrained output, as in chat templates."""


def after_reasoning(message: str, marks: ReasoningMarks, *, begun: bool, token_id: TokenId = lambda _: None) -> str:
    """Return a grammar that allows unconstrained reasoning, followed by output that matches the grammar `message`.

    Args:
        message: grammar of the output after the reasoning.
        marks: markers before and after the reasoning.
        begun: whether the prompt ends inside a reasoning block. If True, the closing marker is required. If False, the
            whole reasoning is optional.
        token_id: function that returns the token id of a marker, or None if the marker is not a single token.
    """
    rules = Rules(token_id)
    thought = rules.add("THOUGHT", without((marks.close,)))
    reasoning = f"{rules.text_to('', marks.close, thought)} {_MARGIN}"
    if not begun:
        reasoning = f"({rules.marker(marks.open)} {reasoning})?"
    return rules.serialised(f"{reasoning} {rules.include('message', message)}")


def in_final_channel(message: str, *, reasons: bool = True, token_id: TokenId = lambda _: None) -> str:
    """Return a grammar for output in Harmony's final channel, whose content matches the grammar `message`.

    Args:
        message: grammar of the content.
        reasons: whether a reasoning message may precede the final message.
        token_id: function that returns the token id of a marker, or None if the marker is not a single token.
    """
    rules = Rules(token_id)
    lead = harmony_message(rules, "analysis") if reasons else ""
    return rules.serialised(f"{lead} {harmony_final(rules, rules.include('message', message))}")


def harmony_message(rules: Rules, channel: str) -> str:
    """Return a Lark expression for an optional Harmony message in `channel`.

    The expression ends with the beginning of the next message, `<|start|>assistant`.
    """
    start, end = rules.marker("<|start|>"), harmony_text(rules, "<|end|>")
    return f'({rules.marker("<|channel|>")} "{channel}" {rules.marker("<|message|>")} {end} {start} "assistant")?'


def harmony_final(rules: Rules, message: str) -> str:
    """Return a Lark expression for Harmony's final message, whose content matches the Lark expression `message`.

    The header of the final message may state that the content is in the format `json`.
    """
    constrain = rules.marker("<|constrain|>")
    head = f'{rules.marker("<|channel|>")} "final" (" "? {constrain} "json")?'
    return f"{head} {rules.marker('<|message|>')} {message}"


def harmony_text(rules: Rules, end: str = "") -> str:
    """Return a Lark expression for the text of a Harmony message. If `end` is not empty, the marker `end` follows."""
    text = rules.add("TEXT", without(tuple(sorted(TOOL_CALL_FORMATS["harmony"].markers))))
    return rules.text_to("", end, text) if end else text
