"""Grammars of answers after unconstrained reasoning."""

from helexa.neuron.grammar.rules import Rules, TokenId, without
from helexa.neuron.parsers.formats.choice import FAMILIES
from helexa.neuron.parsers.reasoning import ReasoningMarks

_MARGIN = r"/\n{0,2}/"
"""Text between the end of reasoning and the constrained answer, as in chat templates."""


def after_reasoning(message: str, marks: ReasoningMarks, *, begun: bool, token_id: TokenId = lambda _: None) -> str:
    """Return the grammar of `message` after reasoning. The reasoning is optional unless the prompt has `begun` it."""
    rules = Rules(token_id)
    thought = rules.add("THOUGHT", without((marks.close,)))
    reasoning = f"{rules.text_to('', marks.close, thought)} {_MARGIN}"
    if not begun:
        reasoning = f"({rules.marker(marks.open)} {reasoning})?"
    return rules.serialised(f"{reasoning} {rules.include('message', message)}")


def in_final_channel(message: str, *, reasons: bool = True, token_id: TokenId = lambda _: None) -> str:
    """Return the grammar of `message` in harmony's framing, after optional reasoning unless `reasons` is False."""
    rules = Rules(token_id)
    lead = harmony_message(rules, "analysis") if reasons else ""
    return rules.serialised(f"{lead} {harmony_final(rules, rules.include('message', message))}")


def harmony_message(rules: Rules, channel: str) -> str:
    """Return the grammar of an optional harmony message that another message follows."""
    start, end = rules.marker("<|start|>"), harmony_text(rules, "<|end|>")
    return f'({rules.marker("<|channel|>")} "{channel}" {rules.marker("<|message|>")} {end} {start} "assistant")?'


def harmony_final(rules: Rules, message: str) -> str:
    """Return the grammar of harmony's final message with the content `message`. The model may name the format."""
    constrain = rules.marker("<|constrain|>")
    head = f'{rules.marker("<|channel|>")} "final" (" "? {constrain} "json")?'
    return f"{head} {rules.marker('<|message|>')} {message}"


def harmony_text(rules: Rules, end: str = "") -> str:
    """Return the grammar of a harmony message's text, up to the marker `end`."""
    text = rules.add("TEXT", without(tuple(sorted(FAMILIES["harmony"].markers))))
    return rules.text_to("", end, text) if end else text
