"""The HTTP cases of Open Responses' compliance suite, rewritten from the public specification.

`CASES` can be sent to any server. `Specification` checks responses and stream events against the published schemas.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import jsonschema

import packages

_PIXEL = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQ"
    "VR42mP8z8BQDwAEhQGAhKmMIQAAAABJRU5ErkJggg=="
)
_WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "Look up the weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
# The published bundle is older than compaction, so these two schemas follow the endpoint's description.
_COMPACTION = {
    "type": "object",
    "required": ["id", "object", "output", "created_at", "usage"],
    "properties": {
        "id": {"type": "string"},
        "object": {"const": "response.compaction"},
        "created_at": {"type": "integer"},
        "output": {"type": "array", "minItems": 1},
        "usage": {"$ref": "#/components/schemas/Usage"},
    },
}
_COMPACTION_ITEM = {
    "type": "object",
    "required": ["type", "id", "encrypted_content"],
    "properties": {
        "type": {"const": "compaction"},
        "id": {"type": "string"},
        "encrypted_content": {"type": "string"},
    },
}


def message(role: str, content: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": content, **fields}


@dataclass(frozen=True)
class Case:
    """One request, and the properties that its response must have.

    Attributes:
        items: item types that must occur in the output.
        statuses: accepted HTTP statuses.
        vision: whether the model must accept images.
    """

    name: str
    body: Mapping[str, Any]
    path: str = "/v1/responses"
    stream: bool = False
    items: Sequence[str] = ()
    statuses: Sequence[int] = (200,)
    vision: bool = False


CASES = (
    Case("basic-response", {"input": [message("user", "Greet me with three words.")]}),
    Case(
        "assistant-phase",
        {
            "input": [
                message("assistant", "Let me look up the number.", phase="commentary"),
                message("assistant", "It is four.", phase="final_answer"),
                message("user", "Say the number again."),
            ]
        },
    ),
    Case("streaming-response", {"input": [message("user", "Count to five.")]}, stream=True),
    Case("system-prompt", {"input": [message("system", "Talk like a pirate."), message("user", "Greet me.")]}),
    Case(
        "tool-calling",
        {"input": [message("user", "How is the weather in Sofia?")], "tools": [_WEATHER]},
        items=("function_call",),
    ),
    Case(
        "image-input",
        {
            "input": [
                message(
                    "user",
                    [
                        {"type": "input_text", "text": "Describe this image."},
                        {"type": "input_image", "image_url": _PIXEL},
                    ],
                )
            ]
        },
        vision=True,
    ),
    Case(
        "multi-turn",
        {
            "input": [
                message("user", "I am called Alice."),
                message("assistant", "Hello, Alice!"),
                message("user", "What am I called?"),
            ]
        },
    ),
    Case(
        "compact-response",
        {
            "prompt_cache_key": "launch",
            "input": [
                message("user", "We launch on Tuesday, after telling support."),
                message("assistant", "Noted: Tuesday, and support hears first."),
            ],
        },
        path="/v1/responses/compact",
        items=("compaction",),
    ),
    Case(
        "compact-missing-model",
        {"model": None, "input": [message("user", "Compact this.")]},
        path="/v1/responses/compact",
        statuses=(400, 422),
    ),
)
"""All cases except `response-output-phase-schema`, which sends no request: it checks only the schema."""


@dataclass(frozen=True)
class Specification:
    """The published schemas of Open Responses."""

    components: Mapping[str, Any]
    events: Mapping[str, str] = field(init=False)

    def __post_init__(self) -> None:
        schemas = {
            value["properties"]["type"]["enum"][0]: name
            for name, value in self.components["schemas"].items()
            if name.endswith("StreamingEvent")
        }
        object.__setattr__(self, "events", schemas)

    def check(self, schema: str | Mapping[str, Any], value: Any) -> None:
        """Raise `jsonschema.ValidationError` unless `value` is valid under the schema."""
        if isinstance(schema, str):
            schema = {"$ref": f"#/components/schemas/{schema}"}
        jsonschema.validate(value, {**schema, "components": self.components})

    def check_response(self, value: Any, case: Case) -> None:
        """Check a response to `case`, or the response in the last event of its stream."""
        if value["object"] == "response.compaction":
            self.check(_COMPACTION, value)
            for item in value["output"]:
                self.check(_COMPACTION_ITEM if item["type"] == "compaction" else "ItemField", item)
        else:
            self.check("ResponseResource", value)
            assert value["status"] == "completed", value["status"]
        assert value["output"]
        assert set(case.items) <= {item["type"] for item in value["output"]}

    def check_stream(self, data: Sequence[str], case: Case) -> None:
        """Check the data of all events of the stream that answers `case`."""
        events = [json.loads(event) for event in data if event != "[DONE]"]
        for event in events:
            self.check(self.events[event["type"]], event)
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        self.check_response(events[-1]["response"], case)


@cache
def specification() -> Specification:
    """Return the Open Responses specification that llama-stack 0.7.3 publishes."""
    folder = packages.from_sdist(
        "llama-stack==0.7.3",
        "5b1f04ec6758c88ab308cee1683bf6e2429aefc151cabd94fb05cc3a1d6ced63",
        "docs/static/openresponses-",
        "openresponses-0.7.3",
    )
    return Specification(json.loads((folder / "spec.json").read_text())["components"])
