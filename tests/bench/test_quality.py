"""Answers that are checked: calls of tools, JSON in a shape, patterns of one's own, pictures."""

import asyncio
import base64
import json
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web

from bench.scripted_node import ScriptedNode, subject_of
from bench.scripted_server import DONE, Script, Step, ended, said, usage
from bench.virtual_time import run
from helexa.bench.scenarios.capability import Capability
from helexa.bench.scenarios.correctness import Case, Correctness, json_correctness, tool_correctness
from helexa.bench.scenarios.image import Image
from helexa.bench.scenarios.scenario import Outcome, Scenario
from helexa.bench.targets.target import ServedModel

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
    return Script([Step(0.1, [event]) for event in events] + [Step(0, [ended(), usage(10, 5), DONE])])


def calls(*functions: tuple[str, str]) -> Script:
    """Calls of tools, each in three chunks: the name, and the arguments in two pieces."""
    events: list[dict[str, Any]] = []
    for index, (name, arguments) in enumerate(functions):
        half = len(arguments) // 2
        pieces = {"name": name, "arguments": ""}, {"arguments": arguments[:half]}, {"arguments": arguments[half:]}
        events += [said(tool_calls=[{"index": index, "function": piece}]) for piece in pieces]
    return streamed(*events)


def right_answer(case: Case) -> Script:
    text = json.dumps(dict(case.expected))
    return calls((case.tool, text)) if case.tool else streamed(said(text))


def score_with(scenario: Correctness, **answers: Script) -> Outcome:
    """What comes of it when all cases are answered right but those that are named, as `case0`."""
    scripts = [answers.get(f"case{number}", right_answer(case)) for number, case in enumerate(scenario.cases)]
    return outcome_of(ScriptedNode(scripts), scenario)


@pytest.mark.parametrize("scenario", [tool_correctness(), json_correctness()])
def test_all_right(scenario: Correctness) -> None:
    outcome = score_with(scenario)
    assert (outcome.error, outcome.columns) == (None, {"score": 1.0})
    assert len(outcome.records) == len(scenario.cases)


TOOLS = {"case0": ("get_weather", '{"city": "Tbilisi"}'), "case1": ("add", '{"a": 1234, "b": 8766}')}


@pytest.mark.parametrize(
    ("answers", "score"),
    [
        ({"case0": calls(("get_weather", '{ "city" : " TBILISI " }'))}, 1.0),  # spelt otherwise, the same
        ({"case1": calls(("add", '{"b": 8766, "a": 1234}'))}, 1.0),
        ({"case0": calls(("get_time", '{"city": "Tbilisi"}'))}, 0.8),
        ({"case0": calls(("get_weather", '{"city": "Tbilisi", "unit": "C"}'))}, 0.8),
        ({"case0": calls(("get_weather", '{"city": "Tbil'))}, 0.8),
        ({"case0": calls(("get_weather", '"Tbilisi"'))}, 0.8),
        ({"case0": calls(("get_weather", "[" * 100_000))}, 0.8),
        ({"case0": calls(*[TOOLS["case0"]] * 2)}, 0.8),
        ({"case0": streamed(said('{"name": "get_weather", "arguments": {"city": "Tbilisi"}}'))}, 0.8),
        ({"case1": calls(("add", '{"a": "1234", "b": 8766}'))}, 0.8),
        ({"case1": calls(("add", '{"a": 1234.0, "b": 8766}'))}, 0.8),
        ({"case2": calls(("set_light", '{"room": "kitchen", "on": 0}'))}, 0.8),  # 0 is not false
        ({"case0": calls(TOOLS["case1"]), "case1": calls(TOOLS["case0"])}, 0.6),
    ],
)
def test_calls_are_right_or_wrong(answers: dict[str, Script], score: float) -> None:
    outcome = score_with(tool_correctness(), **answers)
    assert (outcome.error, outcome.columns["score"]) == (None, pytest.approx(score))


@pytest.mark.parametrize(
    ("answers", "score"),
    [
        ({"case0": streamed(said('{"age": 34,'), said(' "name": "maria"}'))}, 1.0),
        ({"case0": streamed(said('```json\n{"name": "Maria", "age": 34}\n```'))}, 0.75),
        ({"case0": streamed(said('{"name": "Maria"}'))}, 0.75),
        ({"case0": streamed(said('{"name": "Maria", "age": 35}'))}, 0.75),
        ({"case0": streamed(said(reasoning_content='{"name": "Maria", "age": 34}'))}, 0.75),
        ({"case2": streamed(said('{"item": "lamp", "count": 3, "gift": 1}'))}, 0.75),
        ({"case3": streamed(said('{"colours": ["red", "blue"]}'))}, 0.75),
        ({"case3": streamed(said('{"colours": ["blue", "red", "red"]}'))}, 0.75),
    ],
)
def test_json_is_right_or_wrong(answers: dict[str, Script], score: float) -> None:
    outcome = score_with(json_correctness(), **answers)
    assert (outcome.error, outcome.columns["score"]) == (None, score)


@pytest.mark.parametrize("scenario", [tool_correctness(), json_correctness()])
def test_an_answer_that_never_came_is_no_wrong_one(scenario: Correctness) -> None:
    assert score_with(scenario, case1=FULL).error == "rejected: HTTP 429: no room"


def test_what_is_asked_for_calls_and_for_json() -> None:
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


def test_what_was_said_is_kept_beside_its_verdict() -> None:
    outcome = score_with(tool_correctness(), case0=calls(("get_weather", '{"city": "Tiflis"}')))
    first, second, *_ = json.loads(outcome.artifact or "")
    assert (first["right"], first["calls"]) == (False, [["get_weather", '{"city": "Tiflis"}']])
    assert second["right"]


def test_models_without_tools_are_asked_for_json_alone() -> None:
    model = model_of(tool_call=False)
    assert not tool_correctness().suits(model, None)
    assert json_correctness().suits(model, None)
    assert not json_correctness().suits(replace(model, context=1000), None)


@pytest.mark.parametrize(
    ("expect", "columns"),
    [((r"def \w+", "return", "yield", "(?i)FOUR"), {"score": 0.75}), (("yield",), {"score": 0.0}), ((), {})],
)
def test_a_probe_is_scored_by_its_patterns_and_kept(expect: tuple[str, ...], columns: dict[str, float]) -> None:
    scripts = [streamed(said("def f():\n"), said(reasoning="yield?"), said("    return 'four'"))] * 2
    node = ScriptedNode(scripts)
    probe = Capability("code", "Write a function.", 64, expect)
    outcome = outcome_of(node, probe)
    assert (outcome.error, outcome.columns) == (None, columns)
    assert outcome.artifact == "def f():\n    return 'four'"
    outcome_of(node, probe)
    assert node.bodies[0] == node.bodies[1]  # answers are compared: no nonce, no other words
    assert node.bodies[0]["messages"] == [{"role": "user", "content": "Write a function."}]


def test_a_probe_that_was_refused_is_no_sample() -> None:
    assert outcome_of(ScriptedNode([FULL]), Capability("code", "x", 64, ("x",))).error == "rejected: HTTP 429: no room"


class Painter(ScriptedNode):
    """A node that draws for three seconds."""

    def __init__(self, answer: dict[str, Any], status: int = 200) -> None:
        super().__init__([], capabilities=["image"])
        self.answer_and_status = answer, status
        self.asked: list[dict[str, Any]] = []

    def routes(self) -> list[web.RouteDef]:
        return [*super().routes(), web.post("/v1/images/generations", self.draw)]

    async def draw(self, request: web.Request) -> web.Response:
        self.asked.append(await request.json())
        await asyncio.sleep(3.0)
        answer, status = self.answer_and_status
        return web.json_response(answer, status=status)


def picture(data: bytes, **more: Any) -> dict[str, Any]:
    return {"data": [{"b64_json": base64.b64encode(data).decode()}]} | more


def test_a_picture_is_timed() -> None:
    painter = Painter(picture(PNG, usage={"image_units": 1}))
    outcome = outcome_of(painter, Image(768))
    assert (outcome.error, outcome.columns) == (None, {"e2e_s": pytest.approx(3.0)})
    assert outcome.extra == {"image_usage": {"image_units": 1}}
    (asked,) = painter.asked
    assert (asked["model"], asked["size"], asked["n"], asked["response_format"]) == ("m", "768x768", 1, "b64_json")
    outcome_of(painter, Image(768))
    assert painter.asked[1] == asked


def test_a_large_picture_is_one_too() -> None:
    assert outcome_of(Painter(picture(PNG + bytes(9 << 20))), Image(2048)).error is None


@pytest.mark.parametrize(
    ("answer", "status", "error"),
    [
        (picture(b"GIF89a"), 200, "the answer is no PNG picture"),
        ({"data": [{"b64_json": "%%%"}]}, 200, "the answer is no PNG picture"),
        ({"data": []}, 200, "the answer is no PNG picture"),
        ({"data": [{"url": "http://x"}]}, 200, "the answer is no PNG picture"),
        ({"error": "out of memory"}, 500, "HTTP 500"),
    ],
)
def test_what_is_no_picture_is_no_sample(answer: dict[str, Any], status: int, error: str) -> None:
    outcome = outcome_of(Painter(answer, status), Image(768))
    assert error in str(outcome.error)
    assert [record.status for record in outcome.records] == ["error"]


def test_only_models_that_draw_are_asked_to() -> None:
    assert not Image(768).suits(model_of(), None)
    assert Image(768).suits(model_of(capabilities=["image"]), None)
