"""What models write when they call tools, per family, however it is cut."""

from itertools import combinations

import pytest

from helexa.neuron.events import ToolCallStart
from helexa.neuron.parsers.parser import OutputParser
from neuron.parsers.respelling import respelling
from neuron.parsers.streams import Said, joined, parser, pieces_at, said
from neuron.parsers.written import WRITTEN

CASES = [
    pytest.param(family, text, expected, id=f"{family}-{number}")
    for family, cases in WRITTEN.items()
    for number, (text, expected) in enumerate(cases)
]


@pytest.mark.parametrize(("family", "text", "expected"), CASES)
def test_the_same_however_it_is_cut(family: str | None, text: str, expected: list[Said]):
    assert said(parser(family), [text]) == expected
    assert said(parser(family), text) == expected
    for cut in range(1, len(text)):
        assert said(parser(family), pieces_at(text, [cut])) == expected, cut
    for cuts in combinations(range(0, len(text), 5), 2):
        assert said(parser(family), pieces_at(text, cuts)) == expected, cuts
    reader = parser(family)
    events = [*reader.push(text), *reader.flush()]
    assert respelling(family, events).fullmatch(text), events


@pytest.mark.parametrize(
    ("family", "head"),
    [
        ("hermes", '<tool_call>{"name": "write_file", "arguments": {"content": "'),
        ("hermes", "<tool_call><function=write_file><parameter=content>"),
        ("qwen_xml", "<tool_call>\n<function=write_file>\n<parameter=content>\n"),
        ("llama3_json", '{"name": "write_file", "parameters": {"content": "'),
        ("llama3_json", '<|python_tag|>write_file.call(content="'),
        ("pythonic", "[write_file(content='"),
        ("mistral", '[TOOL_CALLS][{"name": "write_file", "arguments": {"content": "'),
        ("mistral", '[TOOL_CALLS]write_file[ARGS]{"content": "'),
        ("deepseek", '<｜tool▁call▁begin｜>write_file<｜tool▁sep｜>{"content": "'),
        ("harmony", '<|channel|>commentary to=functions.write_file<|message|>{"content": "'),
    ],
)
def test_arguments_are_passed_on_while_they_are_generated(family: str, head: str):
    reader = parser(family)
    assert joined([event for char in head for event in reader.push(char)]) == [("call", "write_file", '{"content": "')]
    for char in "some long text":
        assert joined([ToolCallStart(0, "", ""), *reader.push(char)]) == [("call", "", char)]
    assert reader.call_is_open


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("qwen_xml", "<tool_call><function=get_weather><parameter=days>3"),
        ("pythonic", "[get_weather(days=3"),
    ],
)
def test_other_arguments_are_passed_on_when_they_are_complete(family: str, text: str):
    reader = parser(family)
    assert joined([event for char in text for event in reader.push(char)]) == [("call", "get_weather", '{"days": ')]


def test_a_call_that_is_cut_off_between_arguments_is_not_whole():
    reader = parser("qwen_xml")
    text = "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n"
    events = [*reader.push(text), *reader.flush(cut=True)]
    assert joined(events)[0] == ("call", "get_weather", '{"city": "Paris"')
    assert reader.call_is_open and not reader.broken


def test_a_string_that_is_defined_elsewhere_is_passed_on_as_it_comes():
    schema = {"properties": {"x": {"$ref": "#/$defs/text"}}, "$defs": {"text": {"type": "string"}}}
    reader = parser("qwen_xml", {"plan": schema})
    assert joined(reader.push("<tool_call><function=plan><parameter=x>7 ")) == [("call", "plan", '{"x": "7 ')]


def test_a_broken_call_is_remembered():
    reader = parser("hermes")
    said(
        reader, '<tool_call>{"name": "ping", "arguments": {"a": x}}</tool_call><tool_call>{"name": "ping"}</tool_call>'
    )
    assert reader.broken and not reader.call_is_open


def test_without_tools_on_offer_a_call_in_a_message_is_its_text():
    text = '<|channel|>commentary to=functions.ping<|message|>{"a": 1}<|call|>'
    assert said(parser("harmony", {}), text) == [("text", '{"a": 1}')]


def test_after_a_prompt_that_closed_the_block_a_lone_mark_is_text():
    def read(text: str) -> list[Said]:
        return said(parser("hermes", reasoned=True), text)

    assert read("<think>a</think>b") == [("thought", "a"), ("text", "b")]  # models that are told not to think do
    assert read("\n</think>\n\nHi </think>.") == [("text", "Hi </think>.")]


def test_a_prompt_that_opened_the_block_starts_inside():
    assert said(parser("hermes", in_reasoning=True), "\nHm.\n</think>\n\nHi.") == [("thought", "Hm."), ("text", "Hi.")]
    reader = parser(None, in_reasoning=True)
    assert reader.in_reasoning
    reader.push("\nHm")
    assert reader.in_reasoning
    reader.push("</thi")
    assert reader.in_reasoning
    reader.push("nk>")
    assert not reader.in_reasoning


def test_the_markers_to_let_through_are_named():
    assert parser("mistral").markers == {"[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "<think>", "</think>"}
    assert OutputParser(None).markers == frozenset()
    assert said(OutputParser(None), ["<think> ", "x"]) == [("text", "<think> x")]


def test_any_name_counts_where_no_tools_are_known():
    text = '<tool_call>{"name": "rm", "arguments": {}}</tool_call>'
    assert said(parser("hermes", None), text) == [("call", "rm", "{}")]
