"""Scenarios that check responses: tool calls, JSON, patterns and images."""

import asyncio
import base64
import json
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web

from bench.scripted_node import ScriptedNode, subject_of
from bench.scripted_server import DONE, Script, Step, delta_chunk, finish_chunk, usage_chunk
from bench.virtual_time import run
from helexa.bench.scenarios.quality import Capability, Case, Correctness, Image, json_correctness, tool_correctness
from helexa.bench.scenarios.scenario import Outcome, Scenario
from helexa.bench.servers import ServedModel

FULL = Script(status=429, body={"error": {"message": "no room"}})
PNG = b"\x89PNG\r\n\x1a\n" + bytes(64)


def outcome_of(node: ScriptedNode, scenario: Scenario) -> Outcome:
    async def work() -> Outcome:
        async with subject_of(node) as subject:
            assert scenario.suits(subject.model, subject.control)
            return await scenario.run(subject, 1)

    return run(work())


def model_of(**entry: Any) -> ServedModel:
    async def work() -> ServedModel:
        async with subject_of(ScriptedNode([], **entry)) as subject:
            return subject.model

    return run(work())


def streamed(*events: dict[str, Any]) -> Script:
    return Script([Step(0.1, [event]) for event in events] + [Step(0, [finish_chunk(), usage_chunk(10, 5), DONE])])


def calls(*functions: tuple[str, str]) -> Script:
    """Stream tool calls, each in three chunks: the name, and the arguments in two chunks."""
    events: list[dict[str, Any]] = []
    for index, (name, arguments) in enumerate(functions):
        half = len(arguments) // 2
        pieces = {"name": name, "arguments": ""}, {"arguments": arguments[:half]}, {"arguments": arguments[half:]}
        events += [delta_chunk(tool_calls=[{"index": index, "function": delta}]) for delta in pieces]
    return streamed(*events)


def right_answer(case: Case) -> Script:
    text = json.dumps(dict(case.expected))
    return calls((case.tool, text)) if case.tool else streamed(delta_chunk(text))


def score_with(scenario: Correctness, **answers: Script) -> Outcome:
    """Run a scenario whose cases get right responses, except for cases given by name, such as `case0`."""
    scripts = [answers.get(f"case{number}", right_answer(case)) for number, case in enumerate(scenario.cases)]
    return outcome_of(ScriptedNode(scripts), scenario)


@pytest.mark.parametrize("scenario", [tool_correctness(), json_correctness()])
def test_scenario_with_only_correct_answers_has_score_1(scenario: Correctness) -> None:
    outcome = score_with(scenario)
    assert (outcome.error, outcome.columns) == (None, {"score": 1.0})
    assert len(outcome.records) == len(scenario.cases)


TOOLS = {"case0": ("get_weather", '{"city": "Tbilisi"}'), "case1": ("add", '{"a": 1234, "b": 8766}')}


@pytest.mark.parametrize(
    ("answers", "score"),
    [
        ({"case0": calls(("get_weather", '{ "city" : " TBILISI " }'))}, 1.0),  # another spelling of the same arguments
        ({"case1": calls(("add", '{"b": 8766, "a": 1234}'))}, 1.0),
        ({"case0": calls(("get_time", '{"city": "Tbilisi"}'))}, 0.8),
        ({"case0": calls(("get_weather", '{"city": "Tbilisi", "unit": "C"}'))}, 0.8),
        ({"case0": calls(("get_weather", '{"city": "Tbil'))}, 0.8),
        ({"case0": calls(("get_weather", '"Tbilisi"'))}, 0.8),
        ({"case0": calls(("get_weather", "[" * 100_000))}, 0.8),
        ({"case0": calls(*[TOOLS["case0"]] * 2)}, 0.8),
        ({"case0": streamed(delta_chunk('{"name": "get_weather", "arguments": {"city": "Tbilisi"}}'))}, 0.8),
        ({"case1": calls(("add", '{"a": "1234", "b": 8766}'))}, 0.8),
        ({"case1": calls(("add", '{"a": 1234.0, "b": 8766}'))}, 0.8),
        ({"case2": calls(("set_light", '{"room": "kitchen", "on": 0}'))}, 0.8),  # 0 is not `false`
        ({"case0": calls(TOOLS["case1"]), "case1": calls(TOOLS["case0"])}, 0.6),
    ],
)
def test_tool_calls_are_scored_against_the_expected_name_and_arguments(
    answers: dict[str, Script], score: float
) -> None:
    outcome = score_with(tool_correctness(), **answers)
    assert (outcome.error, outcome.columns["score"]) == (None, pytest.approx(score))


@pytest.mark.parametrize(
    ("answers", "score"),
    [
        ({"case0": streamed(delta_chunk('{"age": 34,'), delta_chunk(' "name": "maria"}'))}, 1.0),
        ({"case0": streamed(delta_chunk('```json\n{"name": "Maria", "age": 34}\n```'))}, 0.75),
        ({"case0": streamed(delta_chunk('{"name": "Maria"}'))}, 0.75),
        ({"case0": streamed(delta_chunk('{"name": "Maria", "age": 35}'))}, 0.75),
        ({"case0": streamed(delta_chunk(reasoning_content='{"name": "Maria", "age": 34}'))}, 0.75),
        ({"case2": streamed(delta_chunk('{"item": "lamp", "count": 3, "gift": 1}'))}, 0.75),
        ({"case3": streamed(delta_chunk('{"colours": ["red", "blue"]}'))}, 0.75),
        ({"case3": streamed(delta_chunk('{"colours": ["blue", "red", "red"]}'))}, 0.75),
    ],
)
def test_json_answers_are_scored_against_the_expected_object(answers: dict[str, Script], score: float) -> None:
    outcome = score_with(json_correctness(), **answers)
    assert (outcome.error, outcome.columns["score"]) == (None, score)


@pytest.mark.parametrize("scenario", [tool_correctness(), json_correctness()])
def test_rejected_request_fails_the_quality_run_and_is_not_scored_as_wrong(scenario: Correctness) -> None:
    assert score_with(scenario, case1=FULL).error == "rejected: HTTP 429: no room"


def test_requests_contain_the_tools_or_the_json_schema_of_their_case() -> None:
    node = ScriptedNode([right_answer(case) for case in tool_correctness().cases])
    outcome_of(node, tool_correctness())
    assert {len(body["tools"]) for body in node.bodies} == {5}
    offered = {tool["function"]["name"]: tool["function"]["parameters"] for tool in node.bodies[0]["tools"]}
    assert {case.tool for case in tool_correctness().cases} <= offered.keys()
    assert offered["add"]["required"] == ["a", "b"]
    node = ScriptedNode([right_answer(case) for case in json_correctness().cases])
    outcome_of(node, json_correctness())
    for body, case in zip(node.bodies, json_correctness().cases, strict=True):
        form = body["response_format"]["json_schema"]
        assert (form["schema"], form["strict"], "tools" in body) == (case.schema, True, False)
        assert form["schema"]["required"] == list(case.expected)


def test_tool_calls_of_each_quality_case_are_stored_with_their_verdict() -> None:
    outcome = score_with(tool_correctness(), case0=calls(("get_weather", '{"city": "Tiflis"}')))
    first, second, *_ = json.loads(outcome.artifact or "")
    assert (first["right"], first["calls"]) == (False, [["get_weather", '{"city": "Tiflis"}']])
    assert second["right"]


def test_models_without_tool_calls_are_measured_only_with_json_cases() -> None:
    model = model_of(tool_call=False)
    assert not tool_correctness().suits(model, None)
    assert json_correctness().suits(model, None)
    assert not json_correctness().suits(replace(model, context=1000), None)


@pytest.mark.parametrize(
    ("expect", "columns"),
    [((r"def \w+", "return", "yield", "(?i)FOUR"), {"score": 0.75}), (("yield",), {"score": 0.0}), ((), {})],
)
def test_answer_to_a_capability_prompt_is_scored_by_the_expected_patterns_and_stored(
    expect: tuple[str, ...], columns: dict[str, float]
) -> None:
    scripts = [
        streamed(delta_chunk("def f():\n"), delta_chunk(reasoning="yield?"), delta_chunk("    return 'four'"))
    ] * 2
    node = ScriptedNode(scripts)
    probe = Capability("code", "Write a function.", 64, expect)
    outcome = outcome_of(node, probe)
    assert (outcome.error, outcome.columns) == (None, columns)
    assert outcome.artifact == "def f():\n    return 'four'"
    outcome_of(node, probe)
    assert node.bodies[0] == node.bodies[1]  # responses are compared between runs, so prompts have no nonce
    assert node.bodies[0]["messages"] == [{"role": "user", "content": "Write a function."}]


def test_rejected_capability_prompt_yields_no_sample() -> None:
    assert outcome_of(ScriptedNode([FULL]), Capability("code", "x", 64, ("x",))).error == "rejected: HTTP 429: no room"


class ImageNode(ScriptedNode):
    """A node whose image generation takes three seconds."""

    def __init__(self, body: dict[str, Any], status: int = 200) -> None:
        super().__init__([], capabilities=["image"])
        self.response = body, status
        self.requests: list[dict[str, Any]] = []

    def routes(self) -> list[web.RouteDef]:
        return [*super().routes(), web.post("/v1/images/generations", self.draw)]

    async def draw(self, request: web.Request) -> web.Response:
        self.requests.append(await request.json())
        await asyncio.sleep(3.0)
        body, status = self.response
        return web.json_response(body, status=status)


def image_body(data: bytes, **more: Any) -> dict[str, Any]:
    return {"data": [{"b64_json": base64.b64encode(data).decode()}]} | more


def test_duration_of_an_image_generation_request_is_measured() -> None:
    painter = ImageNode(image_body(PNG, usage={"image_units": 1}))
    outcome = outcome_of(painter, Image(768))
    assert (outcome.error, outcome.columns) == (None, {"e2e_s": pytest.approx(3.0)})
    assert outcome.extra == {"image_usage": {"image_units": 1}}
    (request,) = painter.requests
    assert (request["model"], request["size"], request["n"], request["response_format"]) == (
        "m",
        "768x768",
        1,
        "b64_json",
    )
    outcome_of(painter, Image(768))
    assert painter.requests[1] == request


def test_generated_image_of_9_mib_is_accepted() -> None:
    assert outcome_of(ImageNode(image_body(PNG + bytes(9 << 20))), Image(2048)).error is None


@pytest.mark.parametrize(
    ("body", "status", "error"),
    [
        (image_body(b"GIF89a"), 200, "the answer contains no PNG image in base64; see the server's log"),
        ({"data": [{"b64_json": "%%%"}]}, 200, "the answer contains no PNG image in base64; see the server's log"),
        ({"data": []}, 200, "the answer contains no PNG image in base64; see the server's log"),
        ({"data": [{"url": "http://x"}]}, 200, "the answer contains no PNG image in base64; see the server's log"),
        ({"error": "out of memory"}, 500, "HTTP 500"),
    ],
)
def test_response_without_a_valid_image_yields_no_sample(body: dict[str, Any], status: int, error: str) -> None:
    outcome = outcome_of(ImageNode(body, status), Image(768))
    assert error in str(outcome.error)
    assert [record.status for record in outcome.records] == ["error"]


def test_only_image_models_are_measured_with_image_requests() -> None:
    assert not Image(768).suits(model_of(), None)
    assert Image(768).suits(model_of(capabilities=["image"]), None)
