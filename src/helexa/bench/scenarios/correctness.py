"""Checks tool calls and structured responses (JSON Schema) with requests that have only one correct response."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from helexa.bench.identity import ScenarioKey
from helexa.bench.measurement.prompt_request import PromptRequest, Tool, Turn
from helexa.bench.measurement.request_record import RequestRecord
from helexa.bench.scenarios.scenario import Outcome, Subject, first_failure, fits
from helexa.bench.targets.target import Control, ServedModel

_MAX_TOKENS = 512
_PROMPT_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class Case:
    """A request and its correct response.

    Attributes:
        prompt: the prompt.
        expected: correct arguments of the tool call, or the correct JSON response. Strings are compared
            case-insensitively.
        tool: name of the tool that the model must call, or empty if the response is JSON.
        schema: JSON Schema of the response, or None if a tool is called.
    """

    prompt: str
    expected: Mapping[str, Any]
    tool: str = ""
    schema: Mapping[str, Any] | None = None


def _object(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


_TEXT, _WHOLE, _YES_NO = {"type": "string"}, {"type": "integer"}, {"type": "boolean"}
_TOOLS = (
    Tool("get_weather", "Tell the weather in a city.", _object(city=_TEXT)),
    Tool("add", "Add two whole numbers.", _object(a=_WHOLE, b=_WHOLE)),
    Tool("set_light", "Switch the light of a room on or off.", _object(room=_TEXT, on=_YES_NO)),
    Tool("read_file", "Read a file.", _object(path=_TEXT)),
    Tool("list_dir", "List what is in a folder.", _object(path=_TEXT)),
)
_TOOL_CASES = (
    Case("What is the weather in Tbilisi? Use a tool.", {"city": "Tbilisi"}, "get_weather"),
    Case("Use a tool to add 1234 and 8766.", {"a": 1234, "b": 8766}, "add"),
    Case("Switch the light in the kitchen off.", {"room": "kitchen", "on": False}, "set_light"),
    Case("Show me what /etc/hostname says.", {"path": "/etc/hostname"}, "read_file"),
    Case("Which files are there in /var/log?", {"path": "/var/log"}, "list_dir"),
)
_PERSON = _object(name=_TEXT, age=_WHOLE)
_ORDER = _object(item=_TEXT, count=_WHOLE, gift=_YES_NO)
_COLOURS = _object(colours={"type": "array", "items": {"type": "string", "enum": ["red", "green", "blue"]}})
_JSON_CASES = (
    Case("Name and age as JSON: Maria is 34 years old.", {"name": "Maria", "age": 34}, schema=_PERSON),
    Case("Name and age as JSON: our baker, Otto, turned 51.", {"name": "Otto", "age": 51}, schema=_PERSON),
    Case(
        'As JSON, with "item" in the singular: "Three lamps, please, and wrap them: they are a gift."',
        {"item": "lamp", "count": 3, "gift": True},
        schema=_ORDER,
    ),
    Case(
        'As JSON, the colours in the order of the text: "A blue door, and above it a red roof."',
        {"colours": ["blue", "red"]},
        schema=_COLOURS,
    ),
)


@dataclass(frozen=True, slots=True)
class Correctness:
    """A list of cases that are sent one after the other. The score is the share of correct responses."""

    warms_up: ClassVar[bool] = False

    name: str
    cases: Sequence[Case]
    tools: Sequence[Tool]
    right: Callable[[RequestRecord, Case], bool]

    @property
    def key(self) -> ScenarioKey:
        """Name and parameters that identify the scenario in the database."""
        cases = [[case.prompt, dict(case.expected), case.tool, case.schema] for case in self.cases]
        tools = [[tool.name, tool.description, dict(tool.parameters)] for tool in self.tools]
        return ScenarioKey(self.name, "correctness", {"cases": cases, "tools": tools, "max_tokens": _MAX_TOKENS})

    def suits(self, model: ServedModel, control: Control | None) -> bool:
        """Return whether the model generates text, and supports tool calls if the cases need them."""
        return fits(model, _PROMPT_TOKENS, _MAX_TOKENS) and (model.tool_call or not self.tools)

    async def run(self, subject: Subject, seed: int) -> Outcome:
        """Send the requests of all cases one after the other, and compute the share of correct responses as the score.

        A failed request makes the sample invalid, so that the score of the sample is not used.
        """
        records: list[RequestRecord] = []
        verdicts: list[dict[str, Any]] = []
        for case in self.cases:
            question = PromptRequest(
                subject.model.name,
                [Turn("user", case.prompt)],
                _MAX_TOKENS,
                tools=self.tools,
                schema=case.schema,
            )
            record = await subject.client.ask(question)
            records.append(record)
            calls = [[call.name, call.arguments] for call in record.tool_calls]
            right = record.status == "ok" and self.right(record, case)
            verdicts.append({"prompt": case.prompt, "right": right, "text": record.text, "calls": calls})
        return Outcome(
            records,
            error=first_failure(records),
            artifact=json.dumps(verdicts, ensure_ascii=False, indent=1),
            columns={"score": sum(verdict["right"] for verdict in verdicts) / len(verdicts)},
        )


def tool_correctness() -> Correctness:
    """Return the scenario that checks whether the model calls the correct tool with the correct arguments."""
    return Correctness("tools", _TOOL_CASES, _TOOLS, _calls_right)


def json_correctness() -> Correctness:
    """Return the scenario that checks whether responses with a JSON Schema have the correct values."""
    return Correctness("json-schema", _JSON_CASES, (), _says_right)


def _calls_right(record: RequestRecord, case: Case) -> bool:
    if len(record.tool_calls) != 1 or record.tool_calls[0].name != case.tool:
        return False
    return _same(_parsed(record.tool_calls[0].arguments), dict(case.expected))


def _says_right(record: RequestRecord, case: Case) -> bool:
    return _same(_parsed(record.text), dict(case.expected))


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _same(actual: Any, expected: Any) -> bool:
    """Return whether two JSON values are equal.

    Strings are compared case-insensitively, and `1` differs from `true`.
    """
    if isinstance(expected, dict) and isinstance(actual, dict):
        return actual.keys() == expected.keys() and all(_same(actual[key], value) for key, value in expected.items())
    if isinstance(expected, list) and isinstance(actual, list):
        return len(actual) == len(expected) and all(map(_same, actual, expected))
    if isinstance(expected, str) and isinstance(actual, str):
        return actual.strip().casefold() == expected.casefold()
    return type(actual) is type(expected) and actual == expected
