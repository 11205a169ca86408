"""What a prompt has of an answer's reasoning already."""

import pytest

from helexa.neuron.text.model_text import ModelText
from neuron.parsers.streams import Said, said
from neuron.scripted_engine import AGENT_TEMPLATE, byte_tokenizer

ASKED = "<|im_start|>user\nWhat is <think>?<|im_end|>\n<|im_start|>assistant\n"
SAID = "Hm.</think><think>Yes.</think>"


@pytest.mark.parametrize("marks", [(), ("<think>", "</think>")])
@pytest.mark.parametrize(
    ("begun", "inside", "read"),
    [
        ("", False, [("text", "Hm.<think>Yes.</think>")]),
        ("<think>\n", True, [("thought", "Hm.Yes.")]),
        ("<think>\nThis is how a long thought begins", True, [("thought", "Hm.Yes.")]),
        ("<think>\n\n</think>\n\n", False, [("text", "Hm.</think><think>Yes.</think>")]),
        ("<think>\n</think>\n\nI say", False, [("text", "Hm.</think><think>Yes.</think>")]),
    ],
)
def test_the_last_turn_says_whether_the_answer_begins_in_thought(
    marks: tuple[str, ...], begun: str, inside: bool, read: list[Said]
):
    text = ModelText(byte_tokenizer(*marks), AGENT_TEMPLATE, {})
    prompt = text.tokenizer.encode(ASKED + begun)
    assert text.notation.is_inside(prompt) == inside
    reader = text.notation.parser(prompt, {})
    assert reader is not None
    assert said(reader, SAID) == read


def test_where_no_marker_shows_the_last_turn_a_mark_counts_at_the_end_only():
    text = ModelText(byte_tokenizer(), AGENT_TEMPLATE, {})
    notation = text.notation
    for prompt, inside, over in (
        ("USER: What is <think>? ASSISTANT: ", False, False),
        ("SYSTEM: <think>like this</think> USER: Hi. ASSISTANT:", False, False),
        ("USER: Hi. ASSISTANT: <think>\n", True, False),
        ("USER: Hi. ASSISTANT: <think>\n\n</think>\n\n", False, True),
    ):
        ids = text.tokenizer.encode(prompt)
        assert (notation.is_inside(ids), notation.is_over(ids)) == (inside, over)
