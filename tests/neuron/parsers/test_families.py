"""What models write when they call tools, per family, however it is cut."""

from itertools import combinations

import pytest

from helexa.neuron.parsers.parser import OutputParser
from neuron.parsers.streams import Said, parser, pieces_at, said

PARIS = ("call", "get_weather", '{"city": "Paris"}')
PING = ("call", "ping", "{}")

HERMES: list[tuple[str, list[Said]]] = [
    ('<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>', [PARIS]),
    (
        'Let me look.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>\nDone.',
        [("text", "Let me look.\n"), PARIS, PING, ("text", "\nDone.")],
    ),
    (
        "<think>\nHm, <tool_call>?\n</think>\n\n"
        '<tool_call>{"name": "write_file", "arguments": {"content": "<think>\\n</tool_call>"}}</tool_call>',
        [("thought", "Hm, <tool_call>?"), ("call", "write_file", '{"content": "<think>\\n</tool_call>"}')],
    ),
    ('<tool_call>{"arguments": {"city": "Paris"}, "name": "get_weather"}</tool_call>', [PARIS]),
    ('<tool_call>{"name": "ping"}</tool_call>', [PING]),
    ('<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}}}}</tool_call>!', [PARIS, ("text", "!")]),
    (
        '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}}}}}</tool_call>',
        [PARIS, ("text", "}}}}</tool_call>")],
    ),
    ('<tool_call>{"arguments": {"name": "get_weather", "city": "Paris"}}</tool_call>', [PARIS]),
    ('<tool_call>{"name": "get_weather", "arguments": "{\\"city\\": \\"Paris\\"}"}</tool_call>', [PARIS]),
    ('<tool_call>{"name": "ping", "arguments": null}', [PING]),
    (
        '<tool_call>{"name": "rm", "arguments": {}}</tool_call>',
        [("text", '<tool_call>{"name": "rm", "arguments": {}}</tool_call>')],
    ),
    ("<tool_call>garbage</tool_call>", [("text", "<tool_call>garbage</tool_call>")]),
    ("<tool_call></tool_call>", [("text", "<tool_call></tool_call>")]),
    ('<tool_call>{"path": "a"}</tool_call>', [("text", '<tool_call>{"path": "a"}</tool_call>')]),
    ('<tool_call><tool_call>{"name": "ping"}</tool_call>', [("text", "<tool_call>"), PING]),
    ('<tool_call>\n{"name": "ping", "argu', [("text", '<tool_call>\n{"name": "ping", "argu')]),
    ('<tool_call>{"name": "ping", "arguments": {"a": tru', [("call", "ping", '{"a": '), ("text", "tru")]),
    ('<tool_call>{"name": "ping", "arguments": {"a": +1}}', [("call", "ping", '{"a": '), ("text", "+1}}")]),
    ("\n <tool_call>garbage", [("text", "\n <tool_call>garbage")]),
    ('<tool_call>{"name": "ping"}</tool_call>\n<tool_call>x', [PING, ("text", "\n<tool_call>x")]),
    ("a < b, <tool", [("text", "a < b, <tool")]),
    ("  \n", [("text", "  \n")]),
    ("<tool_call>\n<function=ping>\n</function>\n</tool_call>", [PING]),
]

QWEN_XML: list[tuple[str, list[Said]]] = [
    (
        "I look.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n"
        "</parameter>\n<parameter=metric>\ntrue\n</parameter>\n</function>\n</tool_call>",
        [("text", "I look.\n"), ("call", "get_weather", '{"city": "Paris", "days": 3, "metric": true}')],
    ),
    (
        "<function=get_weather><parameter=city>7</parameter><parameter=days>many</parameter>"
        "<parameter=metric>False</parameter><parameter=other>[1, 2]</parameter></function></tool_call>",
        [("call", "get_weather", '{"city": "7", "days": "many", "metric": false, "other": [1, 2]}')],
    ),
    (
        "<tool_call><function=write_file><parameter=content>\n\nif a < b:\n    '<tag>'\n\n</parameter>\n"
        "<parameter=path>a\n</function></tool_call>",
        [("call", "write_file", '{"content": "\\nif a < b:\\n    \'<tag>\'\\n", "path": "a"}')],
    ),
    (
        "<tool_call>\n<function=ping>\n</function>\n</tool_call>\n<tool_call><function=ping></function></tool_call>",
        [PING, PING],
    ),
    ("<function=rm>\n</function>", [("text", "<function=rm>\n</function>")]),
    ("<tool_call><function=ping><parameter=a>1", [("text", "<tool_call><function=ping><parameter=a>1")]),
    (
        "<tool_call><function=ping><parameter=a>1</parameter><parameter=b>2",
        [("call", "ping", '{"a": 1'), ("text", "<parameter=b>2")],
    ),
    ('<tool_call>{"name": "ping", "arguments": {}}</tool_call>', [PING]),
]

GLM: list[tuple[str, list[Said]]] = [
    (
        "\n<think>Hm.</think>\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>",
        [("thought", "Hm."), ("call", "get_weather", '{"city": "Paris", "days": 3}')],
    ),
    (
        "<tool_call>write_file<arg_key>content</arg_key><arg_value>a\n</arg_value></tool_call><tool_call>ping</tool_call>",
        [("call", "write_file", '{"content": "a\\n"}'), PING],
    ),
    ("<tool_call>rm\n</tool_call>", [("text", "<tool_call>rm\n</tool_call>")]),
    ("<tool_call>ping\n<arg_value>", [("text", "<tool_call>ping\n<arg_value>")]),
]

LLAMA: list[tuple[str, list[Said]]] = [
    ('{"name": "get_weather", "parameters": {"city": "Paris"}}', [PARIS]),
    ('\n\n{"type": "function", "name": "get_weather", "parameters": {"city": "Paris"}}', [PARIS]),
    (
        '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris"}}; {"name": "ping", "parameters": {}}',
        [PARIS, PING],
    ),
    ('{"name": "ping", "parameters": {}} and more', [PING, ("text", " and more")]),
    ('{"name": "ping", "parameters": {}}; and more', [PING, ("text", "; and more")]),
    ('{"name": "Bob", "age": 3}', [("text", '{"name": "Bob", "age": 3}')]),
    ('{"age": 3', [("text", '{"age": 3')]),
    ('In JSON: {"name": "ping", "parameters": {}}', [("text", 'In JSON: {"name": "ping", "parameters": {}}')]),
    ('Look: <|python_tag|>get_weather.call(city="Paris")', [("text", "Look: "), PARIS]),
    ("<|python_tag|>import os", [("text", "<|python_tag|>import os")]),
    ('<think>x</think>{"name": "ping", "parameters": {}}', [("thought", "x"), PING]),
]

PYTHONIC: list[tuple[str, list[Said]]] = [
    ('[get_weather(city="Paris")]', [PARIS]),
    (
        "[get_weather(city='Par,)is', days=3, metric=True), ping( )]",
        [("call", "get_weather", '{"city": "Par,)is", "days": 3, "metric": true}'), PING],
    ),
    ("<|python_start|>[ping()]<|python_end|>", [PING]),
    (
        "[write_file(path='it\\'s', lines=[1, {'a': (None, -2.5)}], content=null)]",
        [("call", "write_file", '{"path": "it\'s", "lines": [1, {"a": [null, -2.5]}], "content": null}')],
    ),
    ("[ping(), rm()]", [PING, ("text", ", rm()]")]),
    ("[1, 2, 3]", [("text", "[1, 2, 3]")]),
    ("[link](http://x)", [("text", "[link](http://x)")]),
    ("[ping(a=open('x'))]", [("text", "[ping(a=open('x'))]")]),
    ("[ping(1)]", [("text", "[ping(1)]")]),
]

MISTRAL: list[tuple[str, list[Said]]] = [
    ('[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}, "id": "VvvODy9mT"}]', [PARIS]),
    (
        'Look. [TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris"}}, {"name": "ping"}] x',
        [("text", "Look. "), PARIS, PING, ("text", " x")],
    ),
    ('[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}[TOOL_CALLS]ping[ARGS]{}', [PARIS, PING]),
    ('[TOOL_CALLS]get_weather[CALL_ID]123456789[ARGS]{"city": "Paris"}', [PARIS]),
    ('[TOOL_CALLS]get_weather{"city": "Paris"}', [PARIS]),
    ('[TOOL_CALLS][{"name": "ping"}, {"name": "rm"}]', [PING, ("text", ', {"name": "rm"}]')]),
    ("[TOOL_CALLS]rm[ARGS]{}", [("text", "[TOOL_CALLS]rm[ARGS]{}")]),
    ("[TOOL_CALLS]ping[ARGS]nothing", [("text", "[TOOL_CALLS]ping[ARGS]nothing")]),
    ("[TOOL_", [("text", "[TOOL_")]),
]

_V3 = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"
DEEPSEEK: list[tuple[str, list[Said]]] = [
    (
        "<think>x</think>Look.<｜tool▁calls▁begin｜>"
        + _V3.format("get_weather", '{"city": "Paris"}')
        + "\n"
        + _V3.format("ping", "{}")
        + "<｜tool▁calls▁end｜>",
        [("thought", "x"), ("text", "Look."), PARIS, PING],
    ),
    (
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Paris"}<｜tool▁call▁end｜>'
        "<｜tool▁call▁begin｜>ping<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        [PARIS, PING],
    ),
    ("<｜tool▁call▁begin｜>ping<｜tool▁sep｜>{}<｜tool▁call▁end｜>", [PING]),
    (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>rm<｜tool▁sep｜>{}",
        [("text", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>rm<｜tool▁sep｜>{}")],
    ),
    ("<｜tool▁calls▁begin｜>x", [("text", "<｜tool▁calls▁begin｜>x")]),
]

HARMONY: list[tuple[str, list[Said]]] = [
    (
        "<|channel|>analysis<|message|>User asks.<|end|><|start|>assistant<|channel|>final<|message|>Hello.",
        [("thought", "User asks."), ("text", "Hello.")],
    ),
    (
        "<|channel|>analysis<|message|>Need it.<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather "
        '<|constrain|>json<|message|>{"city": "Paris"}<|call|>',
        [("thought", "Need it."), PARIS],
    ),
    (' to=functions.get_weather<|channel|>commentary json<|message|>{"city": "Paris"}', [PARIS]),
    (
        "<|channel|>commentary<|message|>I look.<|end|>"
        "<|start|>assistant to=functions.ping<|channel|>commentary<|message|>{}<|call|>"
        "<|start|>assistant<|channel|>commentary to=functions.ping<|message|><|call|>",
        [("text", "I look."), PING, PING],
    ),
    (
        "<|channel|>commentary to=functions.rm<|message|>{}<|call|>",
        [("text", "<|channel|>commentary to=functions.rm<|message|>{}<|call|>")],
    ),
    ("<|channel|>final<|message|>a <|b", [("text", "a <|b")]),
    ("<|channel|>final", [("text", "<|channel|>final")]),
    ("no channel", [("text", "no channel")]),
    ("<|channel|>analysis<|message|>cut sho", [("thought", "cut sho")]),
]

NONE: list[tuple[str, list[Said]]] = [
    ("<think>\n\n</think>\n\nHi.", [("text", "Hi.")]),
    ("<think>\na\n\nb \n</think>\n\nHi. \n", [("thought", "a\n\nb"), ("text", "Hi. \n")]),
    ("Before <think>a</think> after", [("text", "Before "), ("thought", "a"), ("text", "after")]),
    ("<think>never <think> ends </th", [("thought", "never <think> ends </th")]),
    ("<think>a</think>\n\n", [("thought", "a")]),
    ("</think> <tool_call>", [("text", "</think> <tool_call>")]),
    (" <thin", [("text", " <thin")]),
    ("", []),
]

CASES = [
    pytest.param(family, text, expected, id=f"{family}-{number}")
    for family, cases in {
        "hermes": HERMES,
        "qwen_xml": QWEN_XML,
        "glm": GLM,
        "llama3_json": LLAMA,
        "pythonic": PYTHONIC,
        "mistral": MISTRAL,
        "deepseek": DEEPSEEK,
        "harmony": HARMONY,
        None: NONE,
    }.items()
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


def test_arguments_are_passed_on_while_they_are_generated():
    reader = parser("hermes")
    for char in '<tool_call>{"name": "write_file", "arguments": ':
        assert reader.push(char) == []
    shown = [len(reader.push(char)) for char in '{"content": "some long text']
    assert shown[0] == 2  # the start and the bracket
    assert set(shown[1:]) == {1}
    assert reader.call_is_open


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
