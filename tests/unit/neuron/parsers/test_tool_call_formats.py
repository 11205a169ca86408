"""Parsing of each tool-call format; the result does not depend on how the text is split."""

from collections.abc import Iterable
from itertools import combinations

import pytest

from helexa.neuron.output_events import ToolCallStart
from helexa.neuron.parsers.formats.tool_call_format import TOOL_CALL_FORMATS
from helexa.neuron.parsers.parser import OutputParser
from helexa.neuron.parsers.reasoning import ReasoningMarks, find_reasoning_marks
from neuron.parsers.output_examples import WRITTEN
from neuron.parsers.output_patterns import respelling
from neuron.parsers.piecewise_parsing import TOOLS, JoinedEvent, join_events, parse_pieces, parser, pieces_at
from nightly import cases

SPACING = cases(23, 4)
"""Characters between the places at which a text is cut twice."""

CASES = [
    pytest.param(format_name, text, expected, id=f"{format_name}-{number}")
    for format_name, cases in WRITTEN.items()
    for number, (text, expected) in enumerate(cases)
]


@pytest.mark.parametrize(("format_name", "text", "expected"), CASES)
def test_parser_events_do_not_depend_on_how_the_text_is_split(
    format_name: str | None, text: str, expected: list[JoinedEvent]
):
    assert parse_pieces(parser(format_name), [text]) == expected
    assert parse_pieces(parser(format_name), text) == expected
    for cut in range(1, len(text)):
        assert parse_pieces(parser(format_name), pieces_at(text, [cut])) == expected, cut
    for cuts in combinations(range(0, len(text), SPACING), 2):
        assert parse_pieces(parser(format_name), pieces_at(text, cuts)) == expected, cuts
    reader = parser(format_name)
    events = [*reader.push(text), *reader.flush()]
    if not (reader.repairs or reader.broken or reader.call_is_open):
        assert respelling(format_name, events).fullmatch(text), events


@pytest.mark.parametrize(
    ("format_name", "head"),
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
        ("gemma4", '<|tool_call>call:write_file{content:<|"|>'),
        ("glm", "<tool_call>write_file<arg_key>content</arg_key><arg_value>"),
        ("minimax_m2", '<minimax:tool_call><invoke name="write_file"><parameter name="content">'),
        ("olmo3", "<function_calls>write_file(content='"),
    ],
)
def test_string_arguments_of_tool_calls_are_streamed(format_name: str, head: str):
    reader = parser(format_name)
    assert join_events([event for char in head for event in reader.push(char)]) == [
        ("call", "write_file", '{"content": "')
    ]
    for char in "some long text":
        assert join_events([ToolCallStart(0, "", ""), *reader.push(char)]) == [("call", "", char)]
    assert reader.call_is_open


@pytest.mark.parametrize(
    ("format_name", "text"),
    [
        ("qwen_xml", "<tool_call><function=get_weather><parameter=days>3"),
        ("pythonic", "[get_weather(days=3"),
    ],
)
def test_arguments_that_are_not_strings_are_returned_only_when_complete(format_name: str, text: str):
    reader = parser(format_name)
    assert join_events([event for char in text for event in reader.push(char)]) == [
        ("call", "get_weather", '{"days": ')
    ]


def test_tool_call_cut_off_between_arguments_is_reported_as_incomplete():
    reader = parser("qwen_xml")
    text = "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n"
    events = [*reader.push(text), *reader.flush(cut=True)]
    assert join_events(events)[0] == ("call", "get_weather", '{"city": "Paris"')
    assert reader.call_is_open and not reader.broken


def test_string_argument_whose_schema_is_a_reference_is_streamed():
    schema = {"properties": {"x": {"$ref": "#/$defs/text"}}, "$defs": {"text": {"type": "string"}}}
    reader = parser("qwen_xml", {"plan": schema})
    assert join_events(reader.push("<tool_call><function=plan><parameter=x>7 ")) == [("call", "plan", '{"x": "7 ')]


def test_malformed_tool_call_sets_the_parsers_flag_broken():
    reader = parser("hermes")
    parse_pieces(
        reader, '<tool_call>{"name": "ping", "arguments": {"a"}}</tool_call><tool_call>{"name": "ping"}</tool_call>'
    )
    assert reader.broken and not reader.call_is_open


def test_harmony_tool_call_is_text_if_no_tools_were_offered():
    text = '<|channel|>commentary to=functions.ping<|message|>{"a": 1}<|call|>'
    assert parse_pieces(parser("harmony", {}), text) == [("text", '{"a": 1}')]


def test_closing_reasoning_marker_within_text_is_text_if_the_prompt_closed_the_reasoning():
    def read(text: str) -> list[JoinedEvent]:
        return parse_pieces(parser("hermes", reasoned=True), text)

    assert read("<think>a</think>b") == [
        ("thought", "a"),
        ("text", "b"),
    ]  # models may reason even if reasoning is disabled
    assert read("\n</think>\n\nHi </think>.") == [("text", "Hi </think>.")]


def test_parser_starts_in_reasoning_if_the_prompt_opened_it():
    assert parse_pieces(parser("hermes", in_reasoning=True), "\nHm.\n</think>\n\nHi.") == [
        ("thought", "Hm."),
        ("text", "Hi."),
    ]
    reader = parser(None, in_reasoning=True)
    assert reader.in_reasoning
    reader.push("\nHm")
    assert reader.in_reasoning
    reader.push("</thi")
    assert reader.in_reasoning
    reader.push("nk>")
    assert not reader.in_reasoning


def test_parser_markers_include_those_of_the_format_and_of_reasoning():
    assert parser("mistral").markers == {"[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "<think>", "</think>"}
    assert OutputParser(None).markers == frozenset()
    assert parse_pieces(OutputParser(None), ["<think> ", "x"]) == [("text", "<think> x")]


def test_any_tool_name_is_accepted_if_the_offered_tools_are_unknown():
    text = '<tool_call>{"name": "rm", "arguments": {}}</tool_call>'
    assert parse_pieces(parser("hermes", None), text) == [("call", "rm", "{}")]


HUNYUAN = ReasoningMarks("<think>", "</think>", answer=("<answer>", "</answer>"))
GEMMA = ReasoningMarks("<|channel>", "<channel|>", label="thought")


@pytest.mark.parametrize(
    ("format_name", "marks", "text", "expected"),
    [
        (
            "hunyuan",
            HUNYUAN,
            "<think>\nHm.\n</think>\n<answer>\nHi.\n</answer>\n",
            [("thought", "Hm."), ("text", "Hi.")],
        ),
        ("hunyuan", HUNYUAN, "<answer>Hi.</answer", [("text", "Hi.</answer")]),
        ("hunyuan", HUNYUAN, "So <answer> it is.</answer>", [("text", "So <answer> it is.</answer>")]),
        (
            "hunyuan",
            HUNYUAN,
            '<think>Hm.</think><answer>\n<tool_calls>[{"name": "ping"}]</tool_calls>\n</answer>',
            [("thought", "Hm."), ("call", "ping", "{}")],
        ),
        ("gemma4", GEMMA, "<|channel>thought\nHm.\n<channel|>Hi.", [("thought", "Hm."), ("text", "Hi.")]),
        (
            "gemma4",
            GEMMA,
            "<|channel>thought\n<channel|><|tool_call>call:ping{}<tool_call|>",
            [("call", "ping", "{}")],
        ),
    ],
)
def test_reasoning_labels_and_marks_around_the_answer_are_dropped(
    format_name: str, marks: ReasoningMarks, text: str, expected: list[JoinedEvent]
):
    def read(pieces: Iterable[str]) -> list[JoinedEvent]:
        return parse_pieces(OutputParser(TOOL_CALL_FORMATS[format_name], reasoning=marks, tools=TOOLS), pieces)

    assert read([text]) == expected
    for cut in range(1, len(text)):
        assert read(pieces_at(text, [cut])) == expected, cut


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('{"name": "edit", "id": 7, "path": "a"}', '{"id": 7, "path": "a"}'),
        ('{"type": "file", "name": "edit", "path": "a"}', '{"type": "file", "path": "a"}'),
        ('{"type": "function", "name": "edit", "path": "a"}', '{"path": "a"}'),
    ],
)
def test_arguments_written_beside_the_tool_name_include_parameters_named_id_and_type(text: str, arguments: str):
    tools = {"edit": {"properties": {"id": {"type": "integer"}, "path": {"type": "string"}, "type": {}}}}
    assert parse_pieces(parser("hermes", tools), [f"<tool_call>{text}</tool_call>"]) == [("call", "edit", arguments)]


def test_id_and_type_of_a_tool_call_are_not_taken_for_arguments():
    text = '<tool_call>{"id": "1", "type": "function", "name": "get_weather", "city": "Paris"}</tool_call>'
    assert parse_pieces(parser("hermes"), [text]) == [("call", "get_weather", '{"city": "Paris"}')]


def test_key_tool_name_in_coheres_format_is_not_counted_as_a_mistake():
    reader = parser("cohere")
    call = '{"tool_call_id": "0", "tool_name": "ping", "parameters": {}}'
    assert parse_pieces(reader, [f"<|START_ACTION|>[\n    {call}\n]<|END_ACTION|>"]) == [("call", "ping", "{}")]
    assert "name_key" not in reader.repairs


@pytest.mark.parametrize("thoughts", ["", "<|START_THINKING|>Hm<|END_THINKING|>"])
def test_markers_around_answers_in_coheres_format_are_dropped(thoughts: str):
    tokens = {f"<|{side}_{part}|>" for side in ("START", "END") for part in ("THINKING", "RESPONSE", "ACTION")}
    marks = find_reasoning_marks(tokens.__contains__, "")
    text = f"{thoughts}<|START_RESPONSE|>Hi!<|END_RESPONSE|>"
    expected: list[JoinedEvent] = [("thought", "Hm")] if thoughts else []
    for pieces in ([text], list(text)):
        reader = OutputParser(TOOL_CALL_FORMATS["cohere"], reasoning=marks, tools=TOOLS)
        assert parse_pieces(reader, pieces) == [*expected, ("text", "Hi!")]
