"""Detection of reasoning that the prompt has already opened or closed."""

import pytest

from helexa.neuron.text.model_text import ModelText
from neuron.parsers.piecewise_parsing import JoinedEvent, parse_pieces
from neuron.scripted_engine import AGENT_TEMPLATE, byte_tokenizer
from neuron.text.conftest import OpenVocabulary

PROMPT = "<|im_start|>user\nWhat is <think>?<|im_end|>\n<|im_start|>assistant\n"
OUTPUT = "Hm.</think><think>Yes.</think>"


@pytest.mark.parametrize("marks", [(), ("<think>", "</think>")])
@pytest.mark.parametrize(
    ("prefix", "inside", "events"),
    [
        ("", False, [("text", "Hm.<think>Yes.</think>")]),
        ("<think>\n", True, [("thought", "Hm.Yes.")]),
        ("<think>\nThis is how a long thought begins", True, [("thought", "Hm.Yes.")]),
        ("<think>\n\n</think>\n\n", False, [("text", "Hm.</think><think>Yes.</think>")]),
        ("<think>\n</think>\n\nI say", False, [("text", "Hm.</think><think>Yes.</think>")]),
    ],
)
def test_reasoning_marker_in_the_last_turn_of_the_prompt_opens_reasoning(
    marks: tuple[str, ...], prefix: str, inside: bool, events: list[JoinedEvent]
):
    text = ModelText(byte_tokenizer(*marks), AGENT_TEMPLATE, {})
    prompt = text.tokenizer.encode(PROMPT + prefix)
    assert text.output_format.is_inside(prompt) == inside
    reader = text.output_format.parser(prompt, {})
    assert reader is not None
    assert parse_pieces(reader, OUTPUT) == events


def test_without_a_turn_marker_only_a_reasoning_marker_at_the_prompt_end_counts():
    text = ModelText(byte_tokenizer(), AGENT_TEMPLATE, {})
    output_format = text.output_format
    for prompt, inside, over in (
        ("USER: What is <think>? ASSISTANT: ", False, False),
        ("SYSTEM: <think>like this</think> USER: Hi. ASSISTANT:", False, False),
        ("USER: Hi. ASSISTANT: <think>\n", True, False),
        ("USER: Hi. ASSISTANT: <think>\n\n</think>\n\n", False, True),
    ):
        ids = text.tokenizer.encode(prompt)
        assert (output_format.is_inside(ids), output_format.is_over(ids)) == (inside, over)


def test_tokens_that_end_the_reasoning_are_decoded_without_a_space_prefix(vocabulary: OpenVocabulary):
    tokenizer = vocabulary("llama-spm")
    end = ModelText(tokenizer, "{{ messages }}<think></think>", {}).output_format.end_of_reasoning()
    assert tokenizer.decode(end) == "\n</think>\n\n"
