"""Grammars of answers that reasoning comes before, which is free but for where it ends."""

from helexa.neuron.grammar.rules import Rules, TokenId, without
from helexa.neuron.parsers.formats.choice import FAMILIES
from helexa.neuron.parsers.reasoning import ReasoningMarks

_MARGIN = r"/\n{0,2}/"
"""What may stand between the end of reasoning and what a grammar asks for, as chat templates have it."""


def after_reasoning(answer: str, marks: ReasoningMarks, *, begun: bool, token_id: TokenId = lambda _: None) -> str:
    """The grammar `answer`, after reasoning that may come or, where the prompt has `begun` it, must end."""
    rules = Rules(token_id)
    thought = rules.add("THOUGHT", without((marks.close,)))
    reasoning = f"{rules.text_to('', marks.close, thought)} {_MARGIN}"
    if not begun:
        reasoning = f"({rules.marker(marks.open)} {reasoning})?"
    return rules.serialised(f"{reasoning} {rules.include('said', answer)}")


def in_final_channel(answer: str, *, reasons: bool = True, token_id: TokenId = lambda _: None) -> str:
    """The grammar `answer`, as harmony frames it: after reasoning that may come, unless it was ended already."""
    rules = Rules(token_id)
    lead = harmony_message(rules, "analysis") if reasons else ""
    return rules.serialised(f"{lead} {harmony_final(rules, rules.include('said', answer))}")


def harmony_message(rules: Rules, channel: str) -> str:
    """One of harmony's messages that another one follows, if the model wants to."""
    start, end = rules.marker("<|start|>"), harmony_text(rules, "<|end|>")
    return f'({rules.marker("<|channel|>")} "{channel}" {rules.marker("<|message|>")} {end} {start} "assistant")?'


def harmony_final(rules: Rules, answer: str) -> str:
    """The message with the answer, whose format the model may name."""
    constrain = rules.marker("<|constrain|>")
    head = f'{rules.marker("<|channel|>")} "final" (" "? {constrain} "json")?'
    return f"{head} {rules.marker('<|message|>')} {answer}"


def harmony_text(rules: Rules, end: str = "") -> str:
    """Text of one of harmony's messages, up to the marker `end`."""
    text = rules.add("TEXT", without(tuple(sorted(FAMILIES["harmony"].markers))))
    return rules.text_to("", end, text) if end else text
