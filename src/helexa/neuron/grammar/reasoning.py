"""Extend a grammar of an answer so that unconstrained reasoning may precede the answer."""

from helexa.neuron.grammar.rules import Rules, TokenId, without
from helexa.neuron.parsers.formats.choice import FAMILIES
from helexa.neuron.parsers.reasoning import ReasoningMarks

_MARGIN = r"/\n{0,2}/"
"""Text between the end of reasoning and the constrained answer, as in chat templates."""


def after_reasoning(message: str, marks: ReasoningMarks, *, begun: bool, token_id: TokenId = lambda _: None) -> str:
    """Return the grammar of reasoning followed by an answer that matches the grammar `message`.

    Args:
        message: grammar of the answer after the reasoning.
        marks: markers before and after the reasoning.
        begun: the prompt ends inside a reasoning block, so the closing marker is required. If False, the reasoning is
            optional.
        token_id: returns the token id of a marker, or None.
    """
    rules = Rules(token_id)
    thought = rules.add("THOUGHT", without((marks.close,)))
    reasoning = f"{rules.text_to('', marks.close, thought)} {_MARGIN}"
    if not begun:
        reasoning = f"({rules.marker(marks.open)} {reasoning})?"
    return rules.serialised(f"{reasoning} {rules.include('message', message)}")


def in_final_channel(message: str, *, reasons: bool = True, token_id: TokenId = lambda _: None) -> str:
    """Return the grammar of an answer in Harmony's final channel, whose content matches the grammar `message`.

    If `reasons` is True, an optional reasoning message may precede the answer.
    """
    rules = Rules(token_id)
    lead = harmony_message(rules, "analysis") if reasons else ""
    return rules.serialised(f"{lead} {harmony_final(rules, rules.include('message', message))}")


def harmony_message(rules: Rules, channel: str) -> str:
    """Return the grammar of an optional Harmony message in `channel`, including the start of the message that follows
    it.
    """
    start, end = rules.marker("<|start|>"), harmony_text(rules, "<|end|>")
    return f'({rules.marker("<|channel|>")} "{channel}" {rules.marker("<|message|>")} {end} {start} "assistant")?'


def harmony_final(rules: Rules, message: str) -> str:
    """Return the grammar of Harmony's final message, whose content matches the rule `message`.

    The message header may name the format `json`.
    """
    constrain = rules.marker("<|constrain|>")
    head = f'{rules.marker("<|channel|>")} "final" (" "? {constrain} "json")?'
    return f"{head} {rules.marker('<|message|>')} {message}"


def harmony_text(rules: Rules, end: str = "") -> str:
    """Return a reference to the text of a Harmony message, followed by the marker `end` if one is given."""
    text = rules.add("TEXT", without(tuple(sorted(FAMILIES["harmony"].markers))))
    return rules.text_to("", end, text) if end else text
