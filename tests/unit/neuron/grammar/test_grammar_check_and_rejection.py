"""Grammars are compiled in a separate process. Hostile grammars end that process, and valid requests are unaffected."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from helexa.core.errors import ApiError
from helexa.neuron.grammar import GrammarChecker, for_choice, for_lark, for_regex, for_schema, for_tools
from helexa.neuron.grammar.grammar_check_and_rejection import MAX_BYTES


@pytest.fixture
async def checker() -> AsyncIterator[GrammarChecker]:
    checker = GrammarChecker()
    yield checker
    await checker.aclose()


async def rejection(checker: GrammarChecker, grammar: str) -> ApiError:
    with pytest.raises(ApiError) as raised:
        await checker.compile_check(grammar, "response_format")
    assert raised.value.status == 400
    assert raised.value.param == "response_format"
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 600
    return raised.value


async def test_valid_grammars_pass_the_check(checker: GrammarChecker):
    for grammar in (for_schema({"type": "object"}), for_regex("a+"), for_choice(["a"]), for_lark('start: "a"')):
        await checker.compile_check(grammar, "guided")
        await checker.compile_check(grammar, "guided")


@pytest.mark.parametrize(
    ("schema", "pointer", "message"),
    [
        ({"type": "strin"}, "", "strin"),
        ({"properties": {"a/b": {"items": {"not": {"const": 1}}}}}, "/properties/a~1b/items", "not"),
        ({"anyOf": [{"type": "null"}, {"pattern": "(?=a)"}]}, "/anyOf/1", "look-ahead"),
        ({"$defs": {"x": {"uniqueItems": True}}, "items": {"$ref": "#/$defs/x"}}, "/$defs/x", "uniqueItems"),
        ({"properties": {"a": {"$ref": "#/nowhere"}}}, "/properties/a", "nowhere"),
        ({"properties": {"a": {"$ref": "https://example.org/a"}}}, "/properties/a", "example.org"),
    ],
)
async def test_error_in_a_json_schema_names_its_location(
    checker: GrammarChecker, schema: Any, pointer: str, message: str
):
    error = await rejection(checker, for_schema(schema))
    assert error.code == "invalid_schema"
    assert message in str(error)
    assert str(error).startswith(f"response_format: schema{' at ' if pointer else ''}{pointer}: ")


@pytest.mark.parametrize("format_name", ["hermes", "qwen_xml", "pythonic", "gemma4"])
async def test_required_parameter_that_allows_nothing_is_rejected(checker: GrammarChecker, format_name: str):
    schema = {"type": "object", "properties": {"a": False}, "required": ["a"]}
    error = await rejection(checker, for_tools(format_name, {"plan": schema}, "required", False))
    assert error.code == "invalid_schema"
    assert "Unsatisfiable schema" in str(error)


async def test_error_for_overlapping_schemas_names_a_request_option_that_helps(checker: GrammarChecker):
    either = [{"properties": {"a": {"type": "string"}}}, {"properties": {"b": {"type": "string"}}}]
    grammar = for_schema({"oneOf": either})
    for param, option in (
        ("response_format", "'strict': false"),
        ("tool_choice", "'strict': false"),
        ("guided_json", ""),
    ):
        with pytest.raises(ApiError) as caught:
            await checker.compile_check(grammar, param)
        message = str(caught.value)
        assert "'anyOf'" in message and option in message
        assert "coerce" not in message and ("strict" in message) == bool(option)


@pytest.mark.parametrize("name", ["credit-card", "double", "idn-email", "binary", "x" * 100])
async def test_unknown_string_formats_in_a_json_schema_are_ignored(checker: GrammarChecker, name: str):
    schema = {"properties": {"format": {"format": name}, "a": {"anyOf": [{"type": "string", "format": name}]}}}
    await checker.compile_check(for_schema(schema), "response_format")
    await checker.compile_check(for_schema({"$defs": {"x": schema}, "items": {"$ref": "#/$defs/x"}}), "guided_json")


@pytest.mark.parametrize(
    "keywords",
    [
        {"uniqueItems": False},
        {"not": False},
        {"propertyNames": {"type": "string", "description": "an id"}},
        {"unevaluatedProperties": True},
        {"dependentRequired": {}},
        {"if": {"required": ["a"]}},
        {"then": {"required": ["a"]}},
        {"contains": {"type": "string"}, "minContains": 0},
        {"maxContains": 3},
    ],
)
async def test_json_schema_keywords_without_effect_are_accepted(checker: GrammarChecker, keywords: dict[str, Any]):
    schema = {"properties": {"a": {"anyOf": [keywords, {"type": "null"}]}}, **keywords}
    await checker.compile_check(for_schema(schema), "response_format")


async def test_error_in_the_schema_of_a_tool_names_its_location(checker: GrammarChecker):
    tools = {"a": {}, "b": {"properties": {"x": {"contains": {}}}}}
    error = await rejection(checker, for_tools("hermes", tools, "required", True, strict=["a", "b"]))
    assert str(error).startswith("response_format: tool 1 at /properties/x: ")
    await checker.compile_check(for_tools("hermes", tools, "required", True), "tools")


async def test_error_in_a_grammar_names_the_reason(checker: GrammarChecker):
    for grammar, message in (
        (for_regex("(a"), "unclosed"),
        (for_lark("start: x"), "unknown name"),
        (for_lark(""), "start"),
    ):
        error = await rejection(checker, grammar)
        assert error.code == "invalid_grammar"
        assert message in str(error)


def chain(length: int) -> dict[str, Any]:
    """Return a schema with a chain of `length` definitions that each refer to the next."""
    links = {f"a{index}": {"$ref": f"#/$defs/a{index + 1}"} for index in range(length)}
    return {"$ref": "#/$defs/a0", "$defs": links | {f"a{length}": {"type": "string"}}}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


# The intersection of these patterns has too many states to compute.
STATES = {"allOf": [{"type": "string", "pattern": f"^(a|b)*a(a|b){{{index}}}$"} for index in range(20)]}
HOSTILE = {
    "chain": for_schema(chain(8000)),
    "nested": for_schema(nested(90)),
    "states": for_schema(STATES),
    "rules": for_lark("start: a0\n" + "".join(f"a{index}: a{index + 1} a{index + 1}\n" for index in range(20000))),
    "terminals": for_lark(
        "start: A0\n" + "".join(f'A{index}: "y" A{index + 1}\n' for index in range(9000)) + 'A9000: "x"'
    ),
    "brackets": for_regex("(" * 90000 + "a" + ")" * 90000),
    "choices": for_choice([f"choice {index}" for index in range(20000)]),
    "branches": for_schema(
        {"allOf": [{"anyOf": [{"properties": {f"p{i}": {"enum": [i, j]}}} for j in range(8)]} for i in range(8)]}
    ),
    "large": for_choice(["x" * MAX_BYTES]),
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_hostile_grammar_does_not_break_the_check_of_later_grammars(checker: GrammarChecker, name: str):
    try:
        await checker.compile_check(HOSTILE[name], "response_format")
    except ApiError as error:
        assert error.status == 400
        assert str(await rejection(checker, HOSTILE[name])) == str(error)
    await checker.compile_check(for_schema({"type": "object"}), "response_format")


async def test_event_loop_runs_during_a_grammar_check(checker: GrammarChecker):
    check = asyncio.create_task(rejection(checker, for_schema(STATES)))
    turns = 0
    while not check.done():
        await asyncio.sleep(0.001)
        turns += 1
    assert turns > 20
    await check


async def test_canceled_grammar_check_does_not_change_verdicts_of_later_checks(checker: GrammarChecker):
    for _ in range(3):
        check = asyncio.create_task(checker.compile_check(for_schema(STATES), "response_format"))
        await asyncio.sleep(0)
        check.cancel()
        with pytest.raises(asyncio.CancelledError):
            await check
    assert "not" in str(await rejection(checker, for_schema({"not": {"const": 1}})))
    await checker.compile_check(for_schema({}), "response_format")


async def test_concurrent_grammar_checks_get_their_own_verdicts(checker: GrammarChecker):
    grammars = [for_schema({"const": number} if number % 2 else {"not": {"const": number}}) for number in range(40)]
    results = await asyncio.gather(
        *(checker.compile_check(grammar, "response_format") for grammar in grammars), return_exceptions=True
    )
    assert [isinstance(result, ApiError) for result in results] == [number % 2 == 0 for number in range(40)]


async def test_too_many_concurrent_grammar_checks_are_rejected(checker: GrammarChecker):
    results = await asyncio.gather(
        *(checker.compile_check(for_schema({"const": number}), "x") for number in range(80)), return_exceptions=True
    )
    raised = [result for result in results if isinstance(result, ApiError)]
    assert {error.status for error in raised} == {503}
    assert len(raised) == 80 - 64


async def test_lone_surrogate_in_a_grammar_is_rejected(checker: GrammarChecker):
    assert "an unpaired UTF-16 surrogate" in str(await rejection(checker, for_choice(["\ud800"])))


async def test_verdict_of_a_grammar_check_is_cached(checker: GrammarChecker):
    grammar = json.dumps({"grammars": [{"name": "schema", "json_schema": {"not": {}}}]})
    first = await rejection(checker, grammar)
    await checker.aclose()
    checker._judge = None  # type: ignore[method-assign, assignment]  # a second check would raise
    assert str(await rejection(checker, grammar)) == str(first)
