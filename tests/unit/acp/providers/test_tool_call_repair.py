"""Parsing and repair of tool calls with the format errors of small models."""

import json

import pytest

from helexa.acp.providers.tool_call_repair import MalformedCall, ParsedCall, repair


def _schema(required, *optional, **types):
    properties = {key: {"type": types.get(key, "string")} for key in (*required, *optional)}
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


SCHEMAS = {
    "read_file": _schema(["path"], "line", "limit", line="integer", limit="integer"),
    "list_dir": _schema(["path"]),
    "write_file": _schema(["path", "content"]),
    "edit_file": _schema(["path", "old_text", "new_text"]),
    "bash": _schema(["command"], "cwd"),
    "todo": _schema(["items", "done"], items="array", done="boolean"),
}

READ = ParsedCall("read_file", {"path": "a"})


@pytest.mark.parametrize(
    ("name", "text", "call"),
    [
        ("read_file", '{"path": "a"}', READ),
        ("read_file", "", ParsedCall("read_file", {})),
        ("read_file", "null", ParsedCall("read_file", {})),
        ("read_file", '{"path": "a"}}}}', READ),
        ("read_file", '{"path": "a"} }\n}', READ),
        ("read_file", '"{\\"path\\": \\"a\\"}"', READ),
        (
            "write_file",
            '{"path": "a", "content": "1\n\t2"}',
            ParsedCall("write_file", {"path": "a", "content": "1\n\t2"}),
        ),
        ("mcp_thing", '{"any": 1}', ParsedCall("mcp_thing", {"any": 1})),
        ("", '{"name": "read_file", "arguments": {"path": "a"}}', READ),
        ("", '{"name": "read_file", "parameters": {"path": "a"}}}', READ),
        ("", '{"name": "read_file", "arguments": "{\\"path\\": \\"a\\"}"}', READ),
        ("", '{"type": "function", "function": {"name": "read_file", "arguments": {"path": "a"}}}', READ),
        ("", '{"name": "list_dir"}', ParsedCall("list_dir", {})),
        ("", '{"arguments": {"name": "read_file", "path": "a"}}', READ),
        ("", '{"arguments": {"name": "read_file", "arguments": {"path": "a"}}}', READ),
        ("", '{"command": "ls"}', ParsedCall("bash", {"command": "ls"})),
        ("", '{"arguments": {"command": "ls", "cwd": "/"}}', ParsedCall("bash", {"command": "ls", "cwd": "/"})),
        ("", '{"path": "a", "content": ""}', ParsedCall("write_file", {"path": "a", "content": ""})),
        (
            "",
            '{"path": "a", "old_text": "1", "new_text": "2"}',
            ParsedCall("edit_file", {"path": "a", "old_text": "1", "new_text": "2"}),
        ),
        ("", "<function=read_file><parameter=path>\na\n</parameter></function>", READ),
        ("", "\n<function=read_file>\n<parameter=path>a\n</function>", READ),
        ("", "<function=read_file><parameter=path>a", READ),
        (
            "",
            "<function=read_file><parameter=line>7</parameter><parameter=path>7</parameter></function>",
            ParsedCall("read_file", {"line": 7, "path": "7"}),
        ),
        (
            "",
            "<function=todo><parameter=items>\n[1, {}]\n</parameter><parameter=done>True</parameter></function>",
            ParsedCall("todo", {"items": [1, {}], "done": True}),
        ),
        (
            "",
            "<function=read_file><parameter=line>many</parameter></function>",
            ParsedCall("read_file", {"line": "many"}),
        ),
        ("", "<function=other><parameter=x>1</parameter></function>", ParsedCall("other", {"x": "1"})),
    ],
)
def test_tool_call_text_with_repairable_mistakes_becomes_a_valid_call(name, text, call):
    assert repair(name, text, SCHEMAS) == call


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("read_file", '{"path": "a"', "not valid JSON"),
        ("read_file", '{"path": "a"}}}}}', "unexpected text after the end"),
        ("read_file", '{"path": "a"} and so on', "unexpected text after the end"),
        ("read_file", '{"line": NaN}', "NaN"),
        ("read_file", "[1]", "not a JSON object"),
        ("read_file", '"not JSON"', "not valid JSON"),
        ("", "", "not valid JSON"),
        ("", "[]", "not a JSON object"),
        ("", "{}", "does not name a tool"),
        ("", '{"path": "a"}', "does not name a tool"),
        ("", '{"arguments": {"path": "a"}}', "does not name a tool"),
        ("", '{"command": "ls", "why": "so"}', "does not name a tool"),
        ("", '{"arguments": {"name": "unknown", "path": "a"}}', "does not name a tool"),
        ("", "<function=></function>", "does not name a tool"),
        ("", "[" * 100_000, "nested too deeply"),
    ],
)
def test_tool_call_that_cannot_be_repaired_is_malformed_with_a_reason(name, text, reason):
    call = repair(name, text, SCHEMAS)
    assert isinstance(call, MalformedCall)
    assert reason in call.reason


def test_argument_called_name_is_not_taken_for_the_tool_name():
    schemas = {"create": _schema(["name"])}
    text = json.dumps({"arguments": {"name": "create"}})
    assert repair("", text, schemas) == ParsedCall("create", {"name": "create"})
