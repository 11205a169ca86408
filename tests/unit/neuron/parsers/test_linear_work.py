"""Parsing takes linear work even for single characters.

The tests count executed lines and the characters of strings that functions receive, instead of time.
"""

import sys

import pytest

from neuron.parsers.piecewise_parsing import parser, pieces_at
from nightly import daily

BODIES = {
    "hermes": ('<tool_call>{"name": "write_file", "arguments": {"content": "', '"}}</tool_call>'),
    "untagged": ('```json\n{"name": "write_file", "arguments": {"content": "', '"}}\n```'),
    "qwen_xml": ("<tool_call><function=write_file><parameter=content>", "</parameter></function></tool_call>"),
    "llama3_json": ('{"name": "write_file", "parameters": {"content": "', '"}}'),
    "pythonic": ('[write_file(content="', '")]'),
    "mistral": ('[TOOL_CALLS]write_file[ARGS]{"content": "', '"}'),
    "deepseek": ('<｜tool▁call▁begin｜>write_file<｜tool▁sep｜>{"content": "', '"}<｜tool▁call▁end｜>'),
    "gemma4": ('<|tool_call>call:write_file{content:<|"|>', '<|"|>}<tool_call|>'),
    "glm": ("<tool_call>write_file<arg_key>content</arg_key><arg_value>", "</arg_value></tool_call>"),
    "olmo3": ('<function_calls>write_file(content="', '")</function_calls>'),
    "muse_glimmer": (
        ' to=write_file<|message|><atem:function_calls><atem:invoke name="write_file"><atem:parameter name="content">',
        "</atem:parameter></atem:invoke></atem:function_calls><|eom|>",
    ),
    "harmony": ('<|channel|>commentary to=functions.write_file<|message|>{"content": "', '"}<|call|>'),
}
# The name follows the arguments, so the parser holds the arguments back.
LATE = {"llama3_json": ('{"parameters": {"content": "', '"}, "name": "write_file"}')}


def work(format_name: str, text: str, size: int) -> tuple[int, int]:
    """Parse `text` in pieces of `size` characters.

    Returns:
        The number of executed Python lines plus the number of characters in string arguments, and the maximum number
        of unread characters between pushes.
    """
    lines = unread = 0

    def trace(frame, event, _):
        nonlocal lines
        if "parsers" not in frame.f_code.co_filename:
            return None
        lines += event == "line"
        if event == "call":
            lines += sum(len(value) for value in frame.f_locals.values() if isinstance(value, str))
        return trace

    reader = parser("hermes" if format_name == "untagged" else format_name)
    pieces = pieces_at(text, range(size, len(text), size))
    previous_trace = sys.gettrace()
    sys.settrace(trace)
    try:
        for text in pieces:
            reader.push(text)
            unread = max(unread, len(reader._source.text) - reader._source.at)  # pyright: ignore[reportPrivateUsage]
        reader.flush()
    finally:
        sys.settrace(previous_trace)
    return lines, unread


@pytest.mark.parametrize("format_name", BODIES)
@pytest.mark.parametrize("filling", ["abcdefgh", "< <t </p", "        ", "[[((]))]", "\\n\\u00e9"])
def test_parsing_text_twice_as_long_takes_at_most_about_twice_the_work(format_name: str, filling: str):
    head, tail = BODIES[format_name]
    single_work, unread = work(format_name, head + filling * 30 + tail, 1)
    double_work, double_unread = work(format_name, head + filling * 60 + tail, 1)
    assert double_work < 2.2 * single_work
    assert max(unread, double_unread) < 32


@pytest.mark.parametrize(
    "format_name", daily(["llama3_json", "qwen_xml"], ["hermes", "llama3_json", "qwen_xml", "pythonic"])
)
def test_tool_call_with_100_kb_of_arguments_is_parsed_character_by_character(format_name: str):
    head, tail = (BODIES | LATE)[format_name]
    reader = parser(format_name)
    text = head + "ab cdefghi" * 10_000 + tail
    events = [event for char in text for event in reader.push(char)] + reader.flush()
    assert sum(len(getattr(event, "arguments", "")) for event in events) > 100_000
    assert not reader.call_is_open


def test_parsing_a_gemma_list_twice_as_long_takes_about_twice_the_work():
    def of(count: int) -> int:
        items = ",".join(['{a:<|"|>x,<|"|>,b:[1,null]}'] * count)
        return work("gemma4", f"<|tool_call>call:write_file{{lines:[{items}]}}<tool_call|>", 1)[0]

    assert of(120) < 2.2 * of(60)


def test_parsing_unquoted_gemma_text_with_twice_the_commas_takes_twice_the_work():
    def of(count: int) -> int:
        return work("gemma4", f'<|tool_call>call:write_file{{content:{"a, " * count}<|"|>}}<tool_call|>', 1)[0]

    assert of(400) < 2.2 * of(200)
