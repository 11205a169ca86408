"""Scenarios that check responses: tool calls, JSON, probes and images."""

import base64
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from helexa.bench.client import JsonCalls, TargetError
from helexa.bench.prompts_and_load_generators import PromptRequest, Tool, Turn
from helexa.bench.request_records_and_metrics import RequestRecord
from helexa.bench.scenarios.scenario import Outcome, Scenario, Subject, first_failure
from helexa.bench.servers import NeuronTarget, ServedModel

_MAX_TOKENS = 512
_PROMPT_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class Case:
    """A request and its correct response."""

    prompt: str
    # Correct arguments of the tool call, or the correct JSON response. Strings are compared case-insensitively.
    expected: Mapping[str, Any]
    tool: str = ""  # name of the tool that the model must call, or empty if the response is JSON
    schema: Mapping[str, Any] | None = None  # JSON Schema of the response, or None if a tool is called


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
_COLORS = _object(colours={"type": "array", "items": {"type": "string", "enum": ["red", "green", "blue"]}})
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
        schema=_COLORS,
    ),
)


@dataclass(frozen=True, slots=True)
class Correctness(Scenario):
    """Requests with known correct responses, sent one after the other.

    The score is the share of correct responses.
    """

    kind: ClassVar[str] = "correctness"
    warms_up: ClassVar[bool] = False

    name: str
    cases: Sequence[Case]
    tools: Sequence[Tool]
    right: Callable[[RequestRecord, Case], bool]

    def _name(self) -> str:
        return self.name

    def _params(self) -> dict[str, Any]:
        cases = [[case.prompt, dict(case.expected), case.tool, case.schema] for case in self.cases]
        tools = [[tool.name, tool.description, dict(tool.parameters)] for tool in self.tools]
        return {"cases": cases, "tools": tools, "max_tokens": _MAX_TOKENS}

    def _tokens(self) -> tuple[int, int]:
        return _PROMPT_TOKENS, _MAX_TOKENS

    def suits(self, model: ServedModel, control: NeuronTarget | None) -> bool:
        """Return whether the model generates text, and supports tool calls if needed."""
        return Scenario.suits(self, model, control) and (model.tool_call or not self.tools)

    async def run(self, subject: Subject, seed: int) -> Outcome:
        """Send all cases one after the other, and score the responses.

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
    """Return the scenario that checks tool calls and their arguments."""
    return Correctness("tools", _TOOL_CASES, _TOOLS, _calls_right)


def json_correctness() -> Correctness:
    """Return the scenario that checks responses with a JSON Schema."""
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


_TOKENS_A_CHAR = 0.5


@dataclass(frozen=True, slots=True)
class Capability(Scenario):
    """A prompt from the configuration, whose response is stored.

    The score is the share of the regular expressions `expect` that match the response. Without expressions, the
    benchmark sets no score. Users can add scores later.
    """

    kind: ClassVar[str] = "capability"
    warms_up: ClassVar[bool] = False

    name: str
    prompt: str
    max_tokens: int
    expect: tuple[str, ...] = ()

    def _name(self) -> str:
        return f"capability:{self.name}"

    def _params(self) -> dict[str, Any]:
        return {"prompt": self.prompt, "max_tokens": self.max_tokens, "expect": list(self.expect)}

    def _tokens(self) -> tuple[int, int]:
        return round(len(self.prompt) * _TOKENS_A_CHAR), self.max_tokens

    async def run(self, subject: Subject, seed: int) -> Outcome:
        """Send the prompt and score the response.

        All samples send the same request, so their responses are comparable.
        """
        record = await subject.client.ask(
            PromptRequest(subject.model.name, [Turn("user", self.prompt)], max_tokens=self.max_tokens)
        )
        matches = [bool(re.search(pattern, record.text)) for pattern in self.expect]
        return Outcome(
            [record],
            error=first_failure([record]),
            artifact=record.text,
            columns={"score": sum(matches) / len(matches)} if matches else {},
        )


_PROMPT = "A red lighthouse on a cliff above a calm sea at dawn"
_SEED = 42
_PNG = b"\x89PNG\r\n\x1a\n"


@dataclass(frozen=True, slots=True)
class Image(Scenario):
    """A request for a square image with a fixed prompt and a fixed seed."""

    kind: ClassVar[str] = "image"

    pixels: int

    def _name(self) -> str:
        return f"image:{self.pixels}"

    def _params(self) -> dict[str, Any]:
        return {"pixels": self.pixels, "prompt": _PROMPT, "seed": _SEED}

    def suits(self, model: ServedModel, control: NeuronTarget | None) -> bool:
        """Return whether the model generates images."""
        return "image" in model.capabilities

    async def run(self, subject: Subject, seed: int) -> Outcome:
        """Request the image and measure the time until the response is complete."""
        client, now = subject.client, subject.clock.now
        calls = JsonCalls(client.session, client.endpoint, client.api_format.headers(client.bearer))
        body = {
            "model": subject.model.name,
            "prompt": _PROMPT,
            "size": f"{self.pixels}x{self.pixels}",
            "n": 1,
            "seed": _SEED,
            "response_format": "b64_json",
        }
        sent, error, answer = now(), None, None
        try:
            answer = await calls.post("/v1/images/generations", body, client.timeout_secs)
        except TargetError as target_error:
            error = str(target_error)
        ended = now()
        if error is None and not _is_png(answer):
            error = "the answer contains no PNG image in base64; see the server's log"
        record = RequestRecord(sent, sent, ended, "error" if error else "ok", error=error)
        usage = answer.get("usage") if isinstance(answer, dict) else None
        return Outcome([record], error=error, columns={"e2e_s": ended - sent}, extra={"image_usage": usage})


def _is_png(answer: Any) -> bool:
    try:
        return base64.b64decode(answer["data"][0]["b64_json"], validate=True).startswith(_PNG)
    except (KeyError, IndexError, TypeError, ValueError):
        return False
