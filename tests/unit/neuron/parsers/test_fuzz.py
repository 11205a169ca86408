"""Random text in random pieces: no text is lost or repeated. `HELEXA_FUZZ` sets the number of texts per format."""

import json
import os

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from helexa.neuron.engine.ipc.messages import TokenOutput
from helexa.neuron.output_events import OutputEvent
from helexa.neuron.parsers.argument_values import strict_loads
from helexa.neuron.parsers.formats.tool_call_format import TOOL_CALL_FORMATS
from helexa.neuron.parsers.output import Tools
from helexa.neuron.requests.answer_reader import AnswerForm, AnswerReader
from helexa.neuron.text.model_text import ModelText
from neuron.parsers.output_patterns import respelling
from neuron.parsers.piecewise_parsing import (
    DAILY_FORMATS,
    MESSAGE_FORMATS,
    TOOLS,
    JoinedEvent,
    join_events,
    parse_pieces,
    parser,
    pieces_at,
)
from neuron.scripted_engine import byte_tokenizer
from nightly import NIGHTLY, cases, daily

FUZZ = cases(48, 3000, "HELEXA_FUZZ")
RANDOM = NIGHTLY or "HELEXA_FUZZ" in os.environ
STREAMS = settings(max_examples=FUZZ, derandomize=not RANDOM)
CALL_SETTINGS = settings(max_examples=FUZZ // 4, derandomize=not RANDOM)

SHARED = ["text", " ", "\n", "<", "é日", "😀", "x<y", "<think>", "</think>", "ping", "get_weather", "rm"]
JSON = [
    '{"name": "ping", "arguments": ',
    '{"name": "rm", "arguments": ',
    "{",
    "}",
    '"a": ',
    "[",
    "]",
    ",",
    '"x"',
    '"',
    "\\",
]
JSON += ["1", "-", "true", "nul", "\\u00e9", "{}", '{"name": "ping", "arguments": {"a": 1}}', '{"name": "ping"}', ":"]
JSON += ['{"arguments": {"a": [1, null]}, "name": "ping"}', '"city": "Paris"', "1e999", ', "note": "x"']
JSON += ['{"name": "ping", "arguments": "{\\"a\\": 1}"}', '{"name": "ping", "arguments": "{\\"a\\": 1e999}"}']
JSON += ['{"arguments": {"name": "ping", "a": 1e999}}', '{"arguments": {"name": "ping", "a": 1}}']
XML = [
    "<function=ping>",
    "<function=get_weather>",
    "<function=rm>",
    "<function=",
    ">",
    "<parameter=a>",
    "<parameter=city>",
    "</parameter>",
    "</function>",
]
XML += ["1", "true", "[1, 2]"]
TAGS = ["<tool_call>", "</tool_call>"]
UNTAGGED_CALLS = ['\n{"name": "ping", "arguments": ', '\n[{"name": "ping", "arguments": {}}', "}\n```\n"]
KEYWORDS = [
    "ping(",
    "rm(",
    "a=",
    "city=",
    "1",
    "'x,)'",
    '"y"',
    ",",
    ", ",
    ")",
    "[1, 'z']",
    "[",
    "]",
    "True",
    "(",
    "\\",
    "'",
]
ALPHABETS = {
    "hermes": SHARED + TAGS * 3 + JSON + XML + ["```json\n", "\n```", "```", *UNTAGGED_CALLS],
    "hermes_strict": SHARED + TAGS * 3 + JSON + XML,
    "qwen_xml": SHARED + TAGS * 2 + XML * 2 + ['{"name": "ping", "arguments": {}}'],
    "llama3_json": SHARED + ["<|python_tag|>"] * 3 + JSON * 2 + [";", "; ", "ping.call(", *KEYWORDS],
    "pythonic": SHARED + ["<|python_start|>", "<|python_end|>"] * 2 + KEYWORDS * 2,
    "mistral": SHARED + ["[TOOL_CALLS]", "[TOOL_CALLS]ping", "[TOOL_CALLS][", "[ARGS]", "[CALL_ID]"] * 3 + JSON,
    "deepseek": SHARED
    + ["<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>ping<｜tool▁sep｜>"] * 3
    + ["<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "function", "\n```json\n", "\n```"] * 3
    + JSON,
    "harmony": SHARED
    + ["<|start|>assistant", "<|channel|>analysis", "<|channel|>commentary", "<|channel|>final"] * 2
    + [
        "<|message|>",
        "<|end|>",
        "<|call|>",
        "<|return|>",
        " to=functions.ping",
        " to=functions.rm",
        "<|constrain|>json",
    ]
    * 3
    + JSON,
}
KIMI = ["<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>"]
KIMI += ["<|tool_call_begin|>functions.ping:0<|tool_call_argument_begin|>", "functions.rm:1", "ping:2"]
ALPHABETS |= {
    "gemma4": SHARED
    + ["<|tool_call>", "<|tool_call>call:ping{", "<|tool_call>call:get_weather{", "<tool_call|>", "call:rm{"] * 2
    + ['<|"|>'] * 4
    + ["city:", "a:", "b:", "{", "}", "[", "]", ",", ":", "1", "true", "None", '"', "\\", '{"a": 1}', "{}"],
    "glm": SHARED
    + [*TAGS, "<tool_call>ping\n", "<tool_call>get_weather", "</tool_call>", "<arg_key>", "</arg_key>"] * 2
    + ["<arg_value>", "</arg_value>", "<arg_key>city</arg_key>\n<arg_value>", "<arg_key>a</arg_key><arg_value>"] * 2
    + ["1", "true", "[1, 2]", '{"name": "ping", "arguments": {}}'],
    "kimi_k2": SHARED + [*KIMI, "<|tool_call_argument_begin|>"] * 3 + JSON,
    "lfm2": SHARED + ["<|tool_call_start|>", "<|tool_call_end|>"] * 2 + KEYWORDS * 2 + JSON[:6],
    "olmo3": SHARED + ["<function_calls>", "</function_calls>", "<function_calls>\nping("] * 2 + KEYWORDS * 2,
    "seed_oss": SHARED + ["<seed:tool_call>", "</seed:tool_call>"] * 3 + XML * 2 + JSON[:6],
    "minimax_m2": SHARED
    + ["<minimax:tool_call>", "</minimax:tool_call>", '<invoke name="ping">', '<invoke name="rm">', "</invoke>"] * 2
    + ['<parameter name="city">', '<parameter name="a">', "</parameter>", "1", "true", "[1, 2]", *JSON[:6]] * 2,
    "muse_glimmer": SHARED
    + ["<|start|>assistant", " to=ping", " to=get_weather", " to=rm", " to=self", " to=user"] * 2
    + ["<|message|>", "<|eom|>", "<|eot|>", "<atem:function_calls>", "</atem:function_calls>"] * 3
    + ['<atem:invoke name="ping">', '<atem:invoke name="rm">', "</atem:invoke>", '<atem:parameter name="city">'] * 2
    + ['<atem:parameter name="a">', "</atem:parameter>", "1", "true", "[1, 2]", *JSON[:6]],
    **{
        name: SHARED + [*marks] * 3 + JSON * 2 + ["```json\n", "```", ";"]
        for name, marks in {
            "cohere": (
                "<|START_ACTION|>",
                "<|END_ACTION|>",
                '{"tool_call_id": "0", "tool_name": "ping", "parameters": ',
            ),
            "command_r": ("Action:", "Action: ```json\n[", '{"tool_name": "ping", "parameters": '),
            "granite": ("<|tool_call|>", "<|tool_call|>["),
            "hunyuan": ("<tool_calls>", "</tool_calls>", "<tool_calls>["),
            "nemotron": ("<TOOLCALL>", "</TOOLCALL>", "<TOOLCALL>["),
            "phi4_mini": ("<|tool_call|>", "<|/tool_call|>", "functools[", "functools"),
        }.items()
    },
}
HEADS = {
    "llama3_json": [""], "pythonic": ["", "["], "harmony": ["", " to=functions.ping", "<|channel|>analysis<|message|>"],
    "muse_glimmer": ["", " to=ping<|message|>", " to=self<|message|>", " to=user<|message|>"],
}  # fmt: skip


@pytest.mark.parametrize("format_name", daily(DAILY_FORMATS, TOOL_CALL_FORMATS))
def test_parser_events_account_for_all_generated_text(format_name: str):
    @STREAMS
    @given(
        head=st.sampled_from(HEADS.get(format_name, [""])),
        parts=st.lists(st.sampled_from(ALPHABETS[format_name]), max_size=30),
        cuts=st.lists(st.integers(0, 300), max_size=20),
        tools=st.sampled_from([TOOLS, None]),
        inside=st.booleans(),
    )
    def check(head: str, parts: list[str], cuts: list[int], tools: Tools | None, inside: bool) -> None:
        raw = head + "".join(parts)
        inside &= format_name not in MESSAGE_FORMATS
        reader = parser(format_name, tools, in_reasoning=inside)
        events: list[OutputEvent] = [*reader.push(raw), *reader.flush()]
        if not (reader.repairs or reader.broken or reader.call_is_open):
            assert respelling(format_name, events).fullmatch(raw), events
        expected = parse_pieces(parser(format_name, tools, in_reasoning=inside), [raw])
        for pieces in (pieces_at(raw, [cut for cut in cuts if cut < len(raw)]), raw):
            assert parse_pieces(parser(format_name, tools, in_reasoning=inside), pieces) == expected
        complete = [_is_object(item[2]) for item in expected if item[0] == "call"]
        assert reader.broken == (not all(complete[:-1]))
        assert reader.call_is_open == (not all(complete[-1:]))
        assert _read_as_tokens(format_name, raw) == parse_pieces(parser(format_name), [raw])

    check()


def _read_as_tokens(format_name: str, raw: str) -> list[JoinedEvent]:
    """Return the events that an `AnswerReader` reads from `raw`, tokenized to markers and bytes."""
    tool_format = TOOL_CALL_FORMATS[format_name]
    text = TEXTS.get(format_name)
    if text is None:
        marks = () if format_name in MESSAGE_FORMATS else ("<think>", "</think>")
        text = TEXTS[format_name] = ModelText(byte_tokenizer(*sorted(tool_format.markers), *marks), "", {})
        text.output_format.tool_call_format = tool_format
    reader = AnswerReader(text, [0], form=AnswerForm(tools=TOOLS))
    tokens = text.tokenizer.encode(raw)
    outputs = [TokenOutput(id=1, tokens=[token]) for token in tokens]
    events = [event for output in (*outputs, TokenOutput(id=1, finish="stop")) for event in reader.read(output)]
    return join_events(events)


TEXTS: dict[str, ModelText] = {}


def _is_object(text: str) -> bool:
    try:
        return isinstance(strict_loads(text), dict)
    except ValueError:
        return False


SCALARS = st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.text(max_size=12)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
)
ARGUMENTS = st.dictionaries(st.sampled_from(["city", "x", "名", "a_b"]), VALUES, max_size=3)
CALLS = st.lists(st.tuples(st.sampled_from(sorted(TOOLS)), ARGUMENTS), min_size=1, max_size=3)


def _spelled(format_name: str, calls: list[tuple[str, dict[str, object]]], indent: int | None) -> str:
    """Return the text of `calls` in the tool-call format `format_name`."""
    texts = [(name, json.dumps(arguments, ensure_ascii=False, indent=indent)) for name, arguments in calls]
    match format_name:
        case "hermes":
            bodies = (f'{{"name": "{name}", "arguments": {arguments}}}' for name, arguments in texts)
            return "\n".join(f"<tool_call>\n{body}\n</tool_call>" for body in bodies)
        case "untagged":
            bodies = [f'{{"name": "{name}", "arguments": {arguments}}}' for name, arguments in texts]
            return "\n".join(bodies) if indent is None else f"```json\n[{', '.join(bodies)}]\n```"
        case "llama3_json":
            return "; ".join(f'{{"name": "{name}", "parameters": {arguments}}}' for name, arguments in texts)
        case "mistral" if indent is None:
            return "".join(f"[TOOL_CALLS]{name}[ARGS]{arguments}" for name, arguments in texts)
        case "mistral":
            inner = ", ".join(f'{{"name": "{name}", "arguments": {arguments}}}' for name, arguments in texts)
            return f"[TOOL_CALLS][{inner}]"
        case "deepseek":
            inner = "".join(
                f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{text}<｜tool▁call▁end｜>" for name, text in texts
            )
            return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>"
        case "harmony":
            return "".join(
                f"<|start|>assistant to=functions.{name}<|channel|>commentary json<|message|>{text}<|call|>"
                for name, text in texts
            )
        case _:
            inner = (
                f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"
                for name, arguments in calls
            )
            return f"[{', '.join(inner)}]"


@pytest.mark.parametrize(
    "format_name", ["hermes", "untagged", "llama3_json", "mistral", "deepseek", "harmony", "pythonic"]
)
def test_tool_calls_written_in_each_format_are_parsed_back_unchanged(format_name: str):
    @CALL_SETTINGS
    @given(calls=CALLS, indent=st.sampled_from([None, 2]), size=st.integers(1, 9))
    def check(calls: list[tuple[str, dict[str, object]]], indent: int | None, size: int) -> None:
        text = _spelled(format_name, calls, indent)
        pieces = pieces_at(text, range(size, len(text), size))
        items: list[JoinedEvent] = parse_pieces(parser("hermes" if format_name == "untagged" else format_name), pieces)
        assert [item[0] for item in items] == ["call"] * len(calls)
        assert [(item[1], json.loads(item[2])) for item in items] == calls

    check()


# Values in tag formats cannot contain these strings. Hypothesis may draw them, since it collects constants of the code.
TAGS_IN_VALUES = ("</parameter>", "<parameter=", "</function>", "</tool_call>")
STRINGS = st.text(alphabet=st.sampled_from('ab1"<>/\\ é{}[]'), max_size=20).map(str.strip)


@CALL_SETTINGS
@given(city=STRINGS, days=st.integers(), metric=st.booleans(), other=VALUES, size=st.integers(1, 9))
def test_tagged_argument_values_get_types_from_the_tool_schema(
    city: str, days: int, metric: bool, other: object, size: int
):
    written = {"city": city, "days": str(days), "metric": str(metric).lower(), "other": json.dumps(other)}
    assume(not any(tag in written["other"] for tag in TAGS_IN_VALUES))
    parameters = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in written.items())
    text = f"<tool_call>\n<function=get_weather>\n{parameters}</function>\n</tool_call>"
    [call] = parse_pieces(parser("qwen_xml"), pieces_at(text, range(size, len(text), size)))
    assert json.loads(call[2]) == {"city": city, "days": days, "metric": metric, "other": other}
