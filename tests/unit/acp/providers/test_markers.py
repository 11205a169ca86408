"""The parser of calls and reasoning in text gives the same result for any chunks and loses no text."""

import itertools

import pytest

from helexa.acp.providers.written_calls import AnswerText, MarkerParser, Thought, UnparsedCall


def parse(chunks, *, fences=False):
    """Return the parsed segments, with adjacent segments of one kind joined."""
    parser = MarkerParser(fences=fences)
    segments = [segment for chunk in chunks for segment in parser.feed(chunk)] + parser.finish()
    joined = []
    for kind, items in itertools.groupby(segments, type):
        if kind is UnparsedCall:
            joined.extend((kind, segment.text, segment.closed) for segment in items)
        else:
            joined.append((kind, "".join(segment.text for segment in items)))
    return joined


ANSWERS = {
    "plain": ("Hello <there> & </tool_call> you", [(AnswerText, "Hello <there> & </tool_call> you")]),
    "thought": ("\n<think>\nhm\n</think>\n\nYes", [(Thought, "\nhm\n"), (AnswerText, "Yes")]),
    "open thought": ("<think>never ends", [(Thought, "never ends")]),
    "a thought is not in the middle": ("a <think> b", [(AnswerText, "a <think> b")]),
    "calls": (
        'I look.\n<tool_call>\n{"name": "a"}\n</tool_call>\n<tool_call>{"b": "<x>"}</tool_call>\n',
        [(AnswerText, "I look.\n"), (UnparsedCall, '\n{"name": "a"}\n', True), (UnparsedCall, '{"b": "<x>"}', True)],
    ),
    "markup": (
        "<tool_call><function=read><parameter=path>\nä.py\n</parameter></function></tool_call>ok",
        [(UnparsedCall, "<function=read><parameter=path>\nä.py\n</parameter></function>", True), (AnswerText, "ok")],
    ),
    "markup without the first tag": (
        "go <function=read><parameter=p>x</parameter></function> on",
        [
            (AnswerText, "go "),
            (UnparsedCall, "<function=read><parameter=p>x</parameter></function>", True),
            (AnswerText, "on"),
        ],
    ),
    "unterminated": ('x<tool_call>{"name": </tool', [(AnswerText, "x"), (UnparsedCall, '{"name": </tool', False)]),
    "the beginning of a tag at the end": ("a < b <tool_cal", [(AnswerText, "a < b <tool_cal")]),
    "thought, call, thought": (
        "<think>1</think><tool_call>2</tool_call><think>3</think>4",
        [(Thought, "1"), (UnparsedCall, "2", True), (Thought, "3"), (AnswerText, "4")],
    ),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_marker_parser_result_does_not_depend_on_chunk_boundaries(name):
    answer, expected = ANSWERS[name]
    assert parse([answer]) == expected
    assert parse(answer) == expected
    for at in range(len(answer)):
        assert parse([answer[:at], answer[at:]]) == expected


def test_text_is_returned_as_soon_as_it_cannot_be_a_marker():
    parser = MarkerParser(fences=False)
    assert parser.feed("Hello, ") == [AnswerText("Hello, ")]
    assert parser.feed("a<b") == [AnswerText("a<b")]
    assert parser.feed("<to") == []
    assert parser.feed("ad>") == [AnswerText("<toad>")]


def test_tool_call_in_a_code_block_is_text_if_option_fences_is_set():
    answer = "So:\n```\n<tool_call>1</tool_call>\n```\n<tool_call>2</tool_call>"
    quoted = [(AnswerText, "So:\n```\n<tool_call>1</tool_call>\n```\n"), (UnparsedCall, "2", True)]
    assert parse([answer], fences=True) == parse(answer, fences=True) == quoted
    assert [kind for kind, *_ in parse(answer)] == [AnswerText, UnparsedCall, AnswerText, UnparsedCall]


@pytest.mark.parametrize("answer", ["<tool_call>oops", "<function=a>", "<tool_call>x</tool_call>"])
def test_unparsed_tool_call_keeps_its_verbatim_text(answer):
    parser = MarkerParser(fences=False)
    (body,) = parser.feed(answer) + parser.finish()
    assert isinstance(body, UnparsedCall)
    assert body.verbatim == answer
