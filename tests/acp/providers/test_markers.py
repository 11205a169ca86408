"""Calls as text: found however the answer arrives, and nothing of it lost."""

import itertools

import pytest

from helexa.acp.providers.markers import Body, MarkerParser, Text, Thought


def pieces(parts, *, fences=False):
    """What comes out, neighbours of one kind joined."""
    parser = MarkerParser(fences=fences)
    found = [piece for part in parts for piece in parser.feed(part)] + parser.finish()
    joined = []
    for kind, group in itertools.groupby(found, type):
        if kind is Body:
            joined.extend((kind, piece.text, piece.closed) for piece in group)
        else:
            joined.append((kind, "".join(piece.text for piece in group)))
    return joined


ANSWERS = {
    "plain": ("Hello <there> & </tool_call> you", [(Text, "Hello <there> & </tool_call> you")]),
    "thought": ("\n<think>\nhm\n</think>\n\nYes", [(Thought, "\nhm\n"), (Text, "Yes")]),
    "open thought": ("<think>never ends", [(Thought, "never ends")]),
    "a thought is not in the middle": ("a <think> b", [(Text, "a <think> b")]),
    "calls": (
        'I look.\n<tool_call>\n{"name": "a"}\n</tool_call>\n<tool_call>{"b": "<x>"}</tool_call>\n',
        [(Text, "I look.\n"), (Body, '\n{"name": "a"}\n', True), (Body, '{"b": "<x>"}', True)],
    ),
    "markup": (
        "<tool_call><function=read><parameter=path>\nä.py\n</parameter></function></tool_call>ok",
        [(Body, "<function=read><parameter=path>\nä.py\n</parameter></function>", True), (Text, "ok")],
    ),
    "markup without the first tag": (
        "go <function=read><parameter=p>x</parameter></function> on",
        [(Text, "go "), (Body, "<function=read><parameter=p>x</parameter></function>", True), (Text, "on")],
    ),
    "unterminated": ('x<tool_call>{"name": </tool', [(Text, "x"), (Body, '{"name": </tool', False)]),
    "the beginning of a tag at the end": ("a < b <tool_cal", [(Text, "a < b <tool_cal")]),
    "thought, call, thought": (
        "<think>1</think><tool_call>2</tool_call><think>3</think>4",
        [(Thought, "1"), (Body, "2", True), (Thought, "3"), (Text, "4")],
    ),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_is_cut_alike_wherever_it_is_split(name):
    answer, expected = ANSWERS[name]
    assert pieces([answer]) == expected
    assert pieces(answer) == expected
    for at in range(len(answer)):
        assert pieces([answer[:at], answer[at:]]) == expected


def test_text_does_not_wait():
    parser = MarkerParser(fences=False)
    assert parser.feed("Hello, ") == [Text("Hello, ")]
    assert parser.feed("a<b") == [Text("a<b")]
    assert parser.feed("<to") == []
    assert parser.feed("ad>") == [Text("<toad>")]


def test_a_quoted_call_is_text_where_calls_come_otherwise():
    answer = "So:\n```\n<tool_call>1</tool_call>\n```\n<tool_call>2</tool_call>"
    quoted = [(Text, "So:\n```\n<tool_call>1</tool_call>\n```\n"), (Body, "2", True)]
    assert pieces([answer], fences=True) == pieces(answer, fences=True) == quoted
    assert [kind for kind, *_ in pieces(answer)] == [Text, Body, Text, Body]


@pytest.mark.parametrize("answer", ["<tool_call>oops", "<function=a>", "<tool_call>x</tool_call>"])
def test_a_call_keeps_how_it_was_written(answer):
    parser = MarkerParser(fences=False)
    (body,) = parser.feed(answer) + parser.finish()
    assert isinstance(body, Body)
    assert body.verbatim == answer
