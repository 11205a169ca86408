"""Tool calls that a grammar accepts can be parsed in the model family's format, and match the tool's schema."""

import json
import random
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helexa.core.errors import ApiError
from helexa.neuron.grammar import for_schema, for_tools
from helexa.neuron.grammar.output_with_calls import MAX_CALLS
from helexa.neuron.parsers.formats.tool_call_format import TOOL_CALL_FORMATS
from neuron.grammar.random_walks import accepts, byte_level, walk
from neuron.grammar.schemas import Schema, tool_schemas
from neuron.parsers.piecewise_parsing import DAILY_FORMATS, MESSAGE_FORMATS, TOOLS, parse_pieces, parser
from nightly import cases, daily

WALKS = cases(20, 1000, "HELEXA_TEST_SCHEMAS")

PLAN: Schema = {
    "type": "object",
    "properties": {
        "steps": {
            "type": "array",
            "items": {"type": "object", "properties": {"text": {"type": "string"}}, "additionalProperties": False},
        },
        "kind": {"enum": ["a", "7", 7, None]},
        "count": {"type": ["integer", "null"]},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "size": {"$ref": "#/$defs/size"},
        "any": {},
        "map": {"type": "object"},
    },
    "required": ["steps", "kind"],
    "$defs": {"size": {"enum": ["s", "m"]}},
}
OFFERED = {**TOOLS, "plan": PLAN}

PYTHONIC = ("pythonic", "lfm2", "olmo3")
FINAL = {"harmony": "<|channel|>final<|message|>", "muse_glimmer": " to=user<|message|>"}
# the markers of messages are tokens in any vocabulary
SPELLED = [name for name in TOOL_CALL_FORMATS if name not in MESSAGE_FORMATS]
CASES = [(name, True) for name in TOOL_CALL_FORMATS] + [(name, False) for name in SPELLED]
DAILY_CASES = daily([(name, tokens) for name, tokens in CASES if name in DAILY_FORMATS], CASES, several=True)


def vocabulary(format_name: str, tokens: bool, special: bool = True):
    return byte_level(sorted(TOOL_CALL_FORMATS[format_name].markers) if tokens else [], special=special)


def check(format_name: str, tools: dict[str, Schema], text: str, *, only_calls: bool) -> list[str]:
    """Assert that all calls in a text are complete and valid; return their names."""
    names: list[str] = []
    for kind, *fields in parse_pieces(parser(format_name, tools), [text]):
        if kind != "call":
            assert not only_calls or kind == "thought", (kind, fields, text)
            continue
        name, arguments = fields
        jsonschema.Draft202012Validator(tools[name]).validate(json.loads(arguments))
        names.append(name)
    return names


@pytest.mark.parametrize(("format_name", "tokens"), DAILY_CASES)
@pytest.mark.parametrize("parallel", [True, False])
def test_random_texts_of_a_grammar_for_required_tool_calls_are_valid_calls(
    format_name: str, tokens: bool, parallel: bool
):
    known = vocabulary(format_name, tokens)
    grammar = for_tools(format_name, OFFERED, "required", parallel, token_id=known.token_id)
    called: set[str] = set()
    most = 0
    for seed in range(2 * WALKS):
        if seed >= WALKS // 2 and called == OFFERED.keys() and (most > 1) == (parallel and format_name != "harmony"):
            break
        text, complete = walk(known, grammar, random.Random(seed), 600)
        if complete:
            names = check(format_name, OFFERED, text, only_calls=True)
            assert names
            called.update(names)
            most = max(most, len(names))
    assert called == OFFERED.keys()
    assert (most > 1) == (parallel and format_name != "harmony")


@pytest.mark.parametrize(("format_name", "tokens"), DAILY_CASES)
def test_tool_calls_in_random_texts_of_a_grammar_for_optional_calls_are_valid(format_name: str, tokens: bool):
    known = vocabulary(format_name, tokens)
    grammar = for_tools(format_name, OFFERED, "auto", True, strict=["get_weather"], token_id=known.token_id)
    calls = texts = 0
    for seed in range(WALKS):
        text, complete = walk(known, grammar, random.Random(seed), 400)
        if complete:
            names = check(format_name, OFFERED, text, only_calls=False)
            calls += len(names)
            texts += not names
    assert texts
    assert calls or not tokens  # random characters hardly ever spell a marker


@settings(max_examples=WALKS)
@given(st.sampled_from(CASES), tool_schemas(), st.booleans(), st.integers(0, 2**32))
def test_grammar_of_tools_accepts_calls_for_random_valid_tool_schemas(
    case: tuple[str, bool], schema: Schema, strict: bool, seed: int
):
    format_name, tokens = case
    known = vocabulary(format_name, tokens, special=bool(seed % 2) or format_name in MESSAGE_FORMATS)
    tools = {"get_it": schema}
    try:
        strictly = ["get_it"] if strict else []
        grammar = for_tools(format_name, tools, "get_it", False, strict=strictly, token_id=known.token_id)
    except ApiError as error:
        assert error.code == "unsupported_schema"
        assert strict or "cannot be written" in str(error)
        assert format_name in PYTHONIC
        return
    text, complete = walk(known, grammar, random.Random(seed), 400)
    if complete:
        assert check(format_name, tools, text, only_calls=True) == ["get_it"]


ARGUMENTS = '{"city": "Paris", "days": 3, "metric": true}'
WRITTEN = {
    "hermes": '<tool_call>\n{"name": "get_weather", "arguments": ' + ARGUMENTS + "}\n</tool_call>",
    "hermes_strict": '<tool_call>\n{"name": "get_weather", "arguments": ' + ARGUMENTS + "}\n</tool_call>",
    "qwen_xml": "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n"
    "</parameter>\n<parameter=metric>\ntrue\n</parameter>\n</function>\n</tool_call>",
    "llama3_json": '{"name": "get_weather", "parameters": ' + ARGUMENTS + "}",
    "pythonic": '[get_weather(city="Paris", days=3, metric=true)]',
    "mistral": '[TOOL_CALLS][{"name": "get_weather", "arguments": ' + ARGUMENTS + "}]",
    "mistral-11": "[TOOL_CALLS]get_weather[ARGS]" + ARGUMENTS,
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
    + ARGUMENTS
    + "\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek-3.1": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
    + ARGUMENTS
    + "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "gemma4": '<|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:3,metric:true}<tool_call|>',
    "glm": "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n<arg_key>days</arg_key>\n"
    "<arg_value>3</arg_value>\n<arg_key>metric</arg_key>\n<arg_value>true</arg_value>\n</tool_call>",
    "glm-4.7": "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris</arg_value><arg_key>days</arg_key>"
    "<arg_value>3</arg_value><arg_key>metric</arg_key><arg_value>true</arg_value></tool_call>",
    "cohere": '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "get_weather", "parameters": '
    + ARGUMENTS
    + "}\n]<|END_ACTION|>",
    "command_r": 'Action: ```json\n[\n    {\n        "tool_name": "get_weather",\n        "parameters": '
    + ARGUMENTS
    + "\n    }\n]\n```",
    "granite": '<|tool_call|>[{"name": "get_weather", "arguments": ' + ARGUMENTS + "}]",
    "hunyuan": '<tool_calls>[{"name": "get_weather", "arguments": ' + ARGUMENTS + "}]</tool_calls>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
    + ARGUMENTS
    + "<|tool_call_end|><|tool_calls_section_end|>",
    "lfm2": '<|tool_call_start|>[get_weather(city="Paris", days=3, metric=true)]<|tool_call_end|>',
    "minimax_m2": '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Paris</parameter>\n'
    '<parameter name="days">3</parameter>\n<parameter name="metric">true</parameter>\n</invoke>\n</minimax:tool_call>',
    "muse_glimmer": " to=self<|message|>Hm.<|eom|><|start|>assistant to=get_weather<|message|><atem:function_calls>\n"
    '<atem:invoke name="get_weather">\n<atem:parameter name="city">Paris</atem:parameter>\n'
    '<atem:parameter name="days">3</atem:parameter>\n<atem:parameter name="metric">true</atem:parameter>\n'
    "</atem:invoke>\n</atem:function_calls>",
    "nemotron": '<TOOLCALL>[{"name": "get_weather", "arguments": ' + ARGUMENTS + "}]</TOOLCALL>",
    "olmo3": '<function_calls>\nget_weather(city="Paris", days=3, metric=true)\n</function_calls>',
    "phi4_mini": '<|tool_call|>[{"name": "get_weather", "arguments": ' + ARGUMENTS + "}]<|/tool_call|>",
    "seed_oss": "<seed:tool_call>\n<function=get_weather>\n<parameter=city>Paris</parameter>\n<parameter=days>3"
    "</parameter>\n<parameter=metric>true</parameter>\n</function>\n</seed:tool_call>",
    "harmony": "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary "
    "to=functions.get_weather <|constrain|>json<|message|>" + ARGUMENTS,
}


@pytest.mark.parametrize("name", WRITTEN)
def test_tool_calls_written_as_chat_templates_render_them_are_accepted(name: str):
    format_name, text = name.partition("-")[0], WRITTEN[name]
    known = byte_level(sorted(TOOL_CALL_FORMATS[format_name].markers))

    def grammar(choice: str) -> str:
        return for_tools(format_name, TOOLS, choice, False, strict=["get_weather"], token_id=known.token_id)

    assert check(format_name, TOOLS, text, only_calls=True) == ["get_weather"]
    assert accepts(grammar("required"), text, known)
    assert accepts(grammar("get_weather"), text, known)
    assert accepts(grammar("auto"), text, known)
    assert not accepts(grammar("ping"), text, known)
    assert not accepts(grammar("auto"), text.replace("days", "hours"), known)
    assert not accepts(grammar("required"), text + "\n" + text, known)


# Calls that parsers recognize beside the form of the chat template, and the text before the call.
LIKE_CALLS = [
    ("hermes", "", '<tools>\n{"name": "get_weather", "arguments": ' + ARGUMENTS + "}\n</tools>"),
    ("hermes_strict", "So: ", WRITTEN["hermes"]),
    ("qwen_xml", "So: ", WRITTEN["qwen_xml"].removeprefix("<tool_call>\n").removesuffix("\n</tool_call>")),
    ("llama3_json", "So: ", "<|python_tag|>" + WRITTEN["llama3_json"]),
    ("llama3_json", "", "<|python_tag|>" + WRITTEN["llama3_json"]),
    ("pythonic", "So: ", "<|python_start|>" + WRITTEN["pythonic"] + "<|python_end|>"),
    ("deepseek", "So: ", "<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>" + ARGUMENTS + "<｜tool▁call▁end｜>"),
    ("phi4_mini", "So: ", 'functools[{"name": "get_weather", "arguments": ' + ARGUMENTS + "}]"),
    ("lfm2", "So: ", WRITTEN["lfm2"]),
    ("gemma4", "So: ", WRITTEN["gemma4"]),
    (
        "kimi_k2",
        "So: ",
        WRITTEN["kimi_k2"].removeprefix("<|tool_calls_section_begin|>").removesuffix("<|tool_calls_section_end|>"),
    ),
]


@pytest.mark.parametrize("tokens", [True, False])
@pytest.mark.parametrize(("format_name", "lead", "text"), LIKE_CALLS)
def test_grammar_of_strict_tools_constrains_calls_in_each_accepted_syntax(
    format_name: str, lead: str, text: str, tokens: bool
):
    known = vocabulary(format_name, tokens)
    grammar = for_tools(format_name, TOOLS, "auto", True, strict=["get_weather"], token_id=known.token_id)
    assert check(format_name, TOOLS, lead + text, only_calls=not lead) == ["get_weather"]
    assert accepts(grammar, lead + text, known)
    assert not accepts(grammar, lead + text.replace("days", "hours"), known)


OBJECT = '{"name": "get_weather", "arguments": ' + ARGUMENTS + "}"
UNTAGGED = [
    OBJECT,
    "I call:\n" + OBJECT,
    "```json\n" + OBJECT + "\n```",
    "```json\n" + OBJECT.removesuffix("}") + "\n}\n```",
    "So:\n```\n" + OBJECT,
    f"[{OBJECT}, {OBJECT}]",
    f"```json\n[\n  {OBJECT}\n]",
    f"{OBJECT}\n{OBJECT}",
    '\n{\n  "name": "get_weather",\n  "arguments": ' + ARGUMENTS + "}",
    '{"type": "function", "name": "get_weather", "arguments": ' + ARGUMENTS + "}",
    "{" + OBJECT + "}",
    '{"arguments": ' + ARGUMENTS + ', "name": "get_weather"}',
]


@pytest.mark.parametrize("tokens", [True, False])
@pytest.mark.parametrize("text", UNTAGGED)
def test_grammar_of_strict_tools_constrains_calls_without_tags(text: str, tokens: bool):
    known = vocabulary("hermes", tokens)
    grammar = for_tools("hermes", TOOLS, "auto", True, strict=["get_weather"], token_id=known.token_id, untagged=True)
    assert set(check("hermes", TOOLS, text, only_calls=False)) == {"get_weather"}
    assert accepts(grammar, text, known)
    assert not accepts(grammar, text.replace("days", "hours", 1), known)
    assert text.startswith(("[", "```json\n[")) or not accepts(grammar, f"{text}\n]", known)
    other = {"get_weather": TOOLS["get_weather"], "pong": {"type": "object"}}
    grammar = for_tools("hermes", other, "auto", True, strict=["pong"], token_id=known.token_id, untagged=True)
    assert accepts(grammar, text, known)


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "Bob", "age": 3}',
        '[1, 2]\n{"name": "get_weather"}\nend',
        "```json\n{}\n```",
        'Its name: {"name": "get_weather", "arguments": 3}',
        '{"names": 1}\n{"name": "get_weathers", "arguments": 3}',
    ],
)
def test_json_that_is_not_a_tool_call_is_accepted_as_unconstrained_text(text: str):
    known = vocabulary("hermes", True)
    grammar = for_tools("hermes", TOOLS, "auto", True, strict=["get_weather"], token_id=known.token_id, untagged=True)
    assert accepts(grammar, text, known)
    assert check("hermes", TOOLS, text, only_calls=False) == []


@pytest.mark.parametrize(("format_name", "tokens"), DAILY_CASES)
def test_text_without_tool_calls_is_unconstrained(format_name: str, tokens: bool):
    known = vocabulary(format_name, tokens)
    grammar = for_tools(format_name, TOOLS, "auto", True, strict=["ping"], token_id=known.token_id)
    lead = FINAL.get(format_name, "")
    assert accepts(grammar, lead + "In <div>s, f(x) = [1] {a} 世界\n", known)


@pytest.mark.parametrize("tokens", [True, False])
@pytest.mark.parametrize("name", WRITTEN)
def test_grammar_of_tools_and_a_response_schema_accepts_a_call_or_a_valid_message(name: str, tokens: bool):
    format_name, text = name.partition("-")[0], WRITTEN[name]
    known = vocabulary(format_name, tokens or name in (*MESSAGE_FORMATS, "lfm2", "mistral-11", "phi4_mini"))
    form = for_schema({"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]})
    grammar = for_tools(format_name, TOOLS, "auto", True, token_id=known.token_id, message=form)
    lead = FINAL.get(format_name, "")
    assert accepts(grammar, text, known)
    assert accepts(grammar, lead + '{"n":3}', known)
    assert not accepts(grammar, lead + '{"n":"3"}', known)
    assert not accepts(grammar, lead + "Three.", known)


@pytest.mark.parametrize("format_name", daily(DAILY_FORMATS, TOOL_CALL_FORMATS))
def test_references_in_a_tool_schema_resolve_inside_tool_call_grammars(format_name: str):
    known = vocabulary(format_name, True)
    schema = {
        "properties": {"x": {"$ref": "#/$defs/tree"}, "y": {"$ref": "#/properties/z"}, "z": {"type": "integer"}},
        "required": ["x", "y"],
        "$defs": {"tree": {"properties": {"next": {"$ref": "#/$defs/tree"}}, "additionalProperties": False}},
    }
    if format_name in PYTHONIC:  # their grammars contain the parameter's schema and the definitions only
        schema["properties"]["y"] = {"type": "integer"}
    tools = {"plan": schema | {"type": "object"}}
    grammar = for_tools(format_name, tools, "required", False, strict=["plan"], token_id=known.token_id)
    completed = 0
    for seed in range(20):
        text, complete = walk(known, grammar, random.Random(seed), 600)
        if complete:
            completed += 1
            assert check(format_name, tools, text, only_calls=True) == ["plan"]
    assert completed


def test_tagged_argument_values_may_contain_markup_except_closing_tags():
    grammar = for_tools("qwen_xml", TOOLS, "write_file", False)
    call = "<tool_call>\n<function=write_file>\n<parameter=content>\n%s\n</parameter>\n</function>\n</tool_call>"
    assert accepts(grammar, call % "<p>a</p>\n</div>\n\n")
    assert not accepts(grammar, call % "a</parameter>")
    assert not accepts(grammar, call % "</function>")
    assert not accepts(grammar, call % "a</tool_call>")


@pytest.mark.parametrize("defined", [{"type": "string"}, {"enum": ["a", "7"]}, {"const": "7"}])
def test_string_argument_with_a_referenced_schema_is_written_without_quotes_in_tags(defined: Schema):
    schema = {"properties": {"x": {"$ref": "#/$defs/text"}}, "required": ["x"], "$defs": {"text": defined}}
    grammar = for_tools("qwen_xml", {"plan": schema}, "required", False, strict=["plan"])
    call = "<tool_call>\n<function=plan>\n<parameter=x>\n7\n</parameter>\n</function>\n</tool_call>"
    assert accepts(grammar, call)
    assert parse_pieces(parser("qwen_xml", {"plan": schema}), [call]) == [("call", "plan", '{"x": "7"}')]


def test_nested_string_parameters_use_tags_unless_their_schema_is_recursive():
    tree = {"type": "object", "properties": {"next": {"$ref": "#/$defs/tree"}}}
    step = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
    for definition, tagged in ((step, True), (tree, False)):
        schema = {"properties": {"x": {"$ref": "#/$defs/tree"}}, "$defs": {"tree": definition}}
        grammar = for_tools("qwen_xml", {"plan": schema}, "required", False)
        value = '{"text": "%s"}' if tagged else '{"next": {}%s}'
        call = "<tool_call>\n<function=plan>\n<parameter=x>\n" + value + "\n</parameter>\n</function>\n</tool_call>"
        assert accepts(grammar, call % "") == tagged
        assert not accepts(grammar, call % "a</parameter>")
        json_call = '<tool_call>\n{"name": "plan", "arguments": {"x": ' + value % "" + "}}\n</tool_call>"
        assert accepts(grammar, json_call) != tagged


def test_long_chains_of_schema_references_are_resolved_quickly():
    links = {f"a{index}": {"anyOf": [{"$ref": f"#/$defs/a{index + 1}"}] * 2} for index in range(5000)}
    schema = {"properties": {"x": {"$ref": "#/$defs/a0"}}, "$defs": links}
    assert "tool_0" in for_tools("qwen_xml", {"plan": schema}, "required", False)


@pytest.mark.parametrize("format_name", daily(DAILY_FORMATS, TOOL_CALL_FORMATS))
@pytest.mark.parametrize(
    "odd", [{"type": [[]]}, {"anyOf": 1}, {"enum": 1}, {"type": 1}, False, 1, {"anyOf": [1]}, {"$ref": 1}]
)
def test_malformed_tool_schemas_raise_no_error_before_the_grammar_check(format_name: str, odd: Any):
    for schema in ({"properties": {"x": odd}}, {"properties": odd}, {"required": odd}, {"$defs": odd}):
        assert "grammars" in for_tools(format_name, {"plan": schema}, "required", True)


def test_enum_values_that_contain_a_closing_tag_are_not_offered():
    schema = {"properties": {"x": {"enum": ["a</parameter>b", "plain", "7"]}, "y": {"enum": ["7", 7]}}}
    grammar = for_tools("qwen_xml", {"plan": schema}, "required", False)
    call = "<tool_call>\n<function=plan>\n<parameter=x>\n%s\n</parameter>\n</function>\n</tool_call>"
    assert accepts(grammar, call % "plain")
    assert accepts(grammar, call % "7")
    assert not accepts(grammar, call % "a</parameter>b")


@pytest.mark.parametrize("keywords", [{"anyOf": [{"required": ["x"]}, {"required": ["y"]}]}, {"required": ["x", "z"]}])
def test_tool_schema_with_keywords_beyond_properties_is_written_as_json(keywords: Schema):
    schema = {"properties": {"x": {"type": "string"}, "y": {"type": "string"}}} | keywords
    grammar = for_tools("qwen_xml", {"plan": schema}, "required", False)
    tagged = "<tool_call>\n<function=plan>\n<parameter=x>\na\n</parameter>\n</function>\n</tool_call>"
    assert not accepts(grammar, tagged)
    assert accepts(grammar, '<tool_call>\n{"name": "plan", "arguments": {"x": "a", "z": 1}}\n</tool_call>')
    assert not accepts(grammar, '<tool_call>\n{"name": "plan", "arguments": {}}\n</tool_call>')


def test_tool_call_with_undeclared_parameters_is_rejected():
    call = '<tool_call>\n{"name": "plan", "arguments": {"x": 1, "z": 1}}\n</tool_call>'
    schema = {"type": "object", "properties": {"x": {}}}
    assert not accepts(for_tools("hermes", {"plan": schema}, "required", False), call)
    assert accepts(for_tools("hermes", {"plan": schema | {"additionalProperties": True}}, "required", False), call)


@pytest.mark.parametrize("nothing", [False, {"not": {}}])
@pytest.mark.parametrize("format_name", ["hermes", "qwen_xml", "pythonic", "gemma4"])
def test_optional_parameter_that_allows_nothing_is_not_written(format_name: str, nothing: Any):
    schema = {"type": "object", "properties": {"a": nothing, "b": {"type": "boolean"}}, "required": ["b"]}
    known = vocabulary(format_name, True)
    grammar = for_tools(format_name, {"plan": schema}, "required", False, strict=["plan"], token_id=known.token_id)
    for seed in range(5):
        text, complete = walk(known, grammar, random.Random(seed))
        assert complete
        assert check(format_name, {"plan": schema}, text, only_calls=True) == ["plan"]


def test_grammar_rejects_more_than_the_maximum_number_of_tool_calls():
    grammar = for_tools("hermes", TOOLS, "required", True)
    call = '<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>'
    assert accepts(grammar, "\n".join([call] * MAX_CALLS))
    assert not accepts(grammar, "\n".join([call] * (MAX_CALLS + 1)))


def test_tool_without_a_schema_accepts_empty_arguments():
    for schema in ({}, {"type": "object", "properties": {}}):
        grammar = for_tools("hermes", {"ping": schema}, "required", False)
        assert accepts(grammar, '<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>')


@pytest.mark.parametrize(
    ("format_name", "tools", "choice", "code", "message"),
    [
        ("hermes", TOOLS, "rm", "invalid_grammar", "no tool 'rm'"),
        ("hermes", {}, "required", "invalid_grammar", "there are no tools"),
        ("hermes", {'a"b': {}}, "required", "invalid_grammar", "cannot be the name"),
        ("hermes", {"a": []}, "required", "invalid_schema", "tool 'a' must be an object"),
        ("pythonic", {"a": {"anyOf": []}}, "required", "unsupported_schema", "tool 'a'"),
        (
            "pythonic",
            {"a": {"properties": {"b c": {}}, "required": ["b c"]}},
            "required",
            "unsupported_schema",
            "rename its parameter 'b c', which cannot be written",
        ),
    ],
)
def test_invalid_tool_definitions_are_rejected(
    format_name: str, tools: dict[str, Any], choice: str, code: str, message: str
):
    with pytest.raises(ApiError, match=message) as error:
        for_tools(format_name, tools, choice, False, strict=list(tools))
    assert (error.value.status, error.value.code) == (400, code)
