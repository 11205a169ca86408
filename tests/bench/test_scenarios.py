"""Loads against a node whose timings are known: conversations, probes, hanging up, swapping."""

from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from statistics import median
from typing import Any

import pytest

from bench.scripted_node import LOAD_SECS, UNLOAD_SECS, ScriptedNode, subject_of
from bench.scripted_server import Script, answer_in
from bench.virtual_time import run
from helexa.bench.measurement.measures import measure, measure_run
from helexa.bench.scenarios import cancel
from helexa.bench.scenarios.agentic import Agentic
from helexa.bench.scenarios.cancel import Cancel
from helexa.bench.scenarios.mixed import Mixed
from helexa.bench.scenarios.scenario import Outcome, Scenario
from helexa.bench.scenarios.swap import Swap
from helexa.bench.targets.target import ServedModel

FULL = Script(status=429, body={"error": {"message": "no room"}})
BROKEN = Script(status=500, body={"error": {"message": "it broke"}})
TALK = Agentic(conversations=2, turns=3, system_tokens=60, tool_tokens=20, tool_secs=1.0, max_tokens=16)


def exactly(seconds: float | list[float]) -> Any:
    return pytest.approx(seconds, rel=1e-6, abs=1e-6)


def outcome_of(node: ScriptedNode, scenario: Scenario, seed: int = 1, salt: str = "salt") -> Outcome:
    async def work() -> Outcome:
        async with subject_of(node, salt) as subject:
            assert scenario.suits(subject.model, subject.control)
            outcome = await scenario.run(subject, seed)
            last = max((record.ended for record in outcome.records), default=0.0)
            assert scenario.key.kind != "agentic" or subject.clock.now() == last  # no tool runs for nobody
            return outcome

    return run(work())


def talking(number: int, at: float) -> Script:
    return answer_in(0.5, 3, 0.1, "well ")


def test_a_turn_repeats_all_that_was_said_and_adds_what_a_tool_returned() -> None:
    node = ScriptedNode(talking)
    outcome = outcome_of(node, TALK)
    assert outcome.error is None
    assert outcome.columns == {"concurrency": 2}
    assert {record.role for record in outcome.records} == {"turn"}
    talks: dict[str, list[Any]] = {}
    for body in node.bodies:
        talks.setdefault(body["messages"][1]["content"], []).append(body["messages"])
    assert [len(turns) for turns in talks.values()] == [3, 3]
    assert len({turns[0][0]["content"] for turns in talks.values()}) == 1  # the system prompt is shared
    for turns in talks.values():
        assert [message["role"] for message in turns[0]] == ["system", "user"]
        for before, after in pairwise(turns):
            assert after[:-2] == before
            assert after[-2] == {"role": "assistant", "content": "well well well "}
            assert after[-1]["content"].startswith("The tool returned: ")
    found = measure_run(outcome.records).distributions
    assert (found["ttft_s"].n, found["ttft_s"].max, found["tpot_s"].p50) == (6, exactly(0.5), exactly(0.1))


def test_a_seed_decides_about_words_and_times_and_a_salt_about_the_first_word() -> None:
    def held(seed: int, salt: str) -> tuple[list[Any], list[float]]:
        node = ScriptedNode(talking)
        outcome_of(node, TALK, seed, salt)
        return [body["messages"] for body in node.bodies], node.arrived

    bodies, arrived = held(1, "a")
    assert held(1, "a") == (bodies, arrived)
    salted, salted_arrived = held(1, "b")
    assert salted_arrived == arrived
    for place in (0, 1):
        (first, words), (other, same) = (said[0][place]["content"].split(" ", 1) for said in (bodies, salted))
        assert (first != other, words == same) == (True, True)
    other_bodies, other_arrived = held(2, "a")
    assert other_bodies[0] != bodies[0]
    assert other_arrived != arrived


def test_tools_take_their_time_and_return_their_words() -> None:
    node = ScriptedNode(talking)
    outcome = outcome_of(node, Agentic(1, 60, 60, tool_tokens=40, tool_secs=2.0, max_tokens=16))
    pauses = [after.sent - before.ended for before, after in pairwise(outcome.records)]
    sizes = [len(message["content"].split()) - 3 for message in node.bodies[-1]["messages"][3::2]]
    for values, middle in ((pauses, 2.0), (sizes, 40)):
        assert len(values) == 59
        assert median(values) == pytest.approx(middle, rel=0.2)
        assert (min(values) < 0.6 * middle, max(values) > 1.7 * middle) == (True, True)


def test_a_conversation_that_is_broken_off_is_no_sample() -> None:
    """It lacks its longest turns: a server that refuses them would look fast."""
    node = ScriptedNode(lambda number, at: FULL if number == 20 else talking(number, at))
    outcome = outcome_of(node, Agentic(2, 15, 60, 20, 1.0, 16))
    assert Counter(record.status for record in outcome.records)["rejected"] == 1
    assert len(outcome.records) < 30
    assert outcome.error == "rejected: HTTP 429: no room"


def mixed_node(long: Callable[[float], Script], probe: Callable[[float], Script]) -> ScriptedNode:
    """Answers by the second at which a request comes, and by its size."""

    def answer(number: int, at: float) -> Script:
        small = node.bodies[number]["max_tokens"] == 1
        return (probe if small else long)(at - node.arrived[0])

    node = ScriptedNode(answer)
    return node


def test_probes_are_what_is_measured_and_long_prompts_are_in_their_way() -> None:
    """Probes at 0, 0.5, 1 ... wait until 1.75, 3.75 ...: a quarter of them for 1.75, 1.25, 0.75 and 0.25 s each."""
    node = mixed_node(
        long=lambda second: answer_in(2.1, 5, 0), probe=lambda second: answer_in(2 - (second + 0.25) % 2, 1, 0)
    )
    outcome = outcome_of(node, Mixed(prompt_tokens=400, duration_secs=8.0, max_tokens=5))
    assert outcome.error is None
    assert Counter(record.role for record in outcome.records) == {"load": 4, "probe": 16}
    assert outcome.measured is not None
    assert {record.role for record in outcome.measured} == {"probe"}
    found = measure_run(outcome.measured).distributions
    assert (found["ttft_s"].n, found["ttft_s"].p50, found["ttft_s"].max) == (16, exactly(1.0), exactly(1.75))
    assert found["client_queue_s"].max == exactly(0.0)
    long = [record for record in outcome.records if record.role == "load"]
    assert [record.sent - long[0].sent for record in long] == exactly([0, 2.1, 4.2, 6.3])  # one after the other
    texts = [body["messages"][0]["content"] for body in node.bodies]
    assert len(set(texts)) == 20
    assert sorted(len(text.split()) > 390 for text in texts) == [False] * 16 + [True] * 4


@pytest.mark.parametrize(
    ("long", "probe", "error"),
    [(FULL, None, "rejected: HTTP 429: no room"), (None, FULL, "rejected: HTTP 429: no room"), (None, BROKEN, "error")],
)
def test_probes_beside_nothing_and_prompts_beside_no_probe_are_no_sample(
    long: Script | None, probe: Script | None, error: str
) -> None:
    fine = answer_in(0.5, 1, 0)
    node = mixed_node(lambda second: long or fine, lambda second: probe or fine)
    assert str(outcome_of(node, Mixed(400, 2.0, 5)).error).startswith(error)


def test_hanging_up_is_timed_until_the_server_counts_the_request_no_longer() -> None:
    node = ScriptedNode([answer_in(0.5, 100, 0.1)])
    node.lingers = 1.0
    outcome = outcome_of(node, Cancel(prompt_tokens=50, max_tokens=100))
    assert outcome.error is None
    (record,) = outcome.records
    assert (record.status, len(record.deltas)) == ("cancelled", 3)
    assert outcome.columns["release_s"] == pytest.approx(1.0, rel=0.02)
    assert [moment - node.arrived[0] for moment in node.gone] == exactly([0.7])


def test_a_request_that_is_never_released_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cancel, "_LONGEST_SECS", 0.1)
    node = ScriptedNode([answer_in(0.5, 100, 0.1)])
    node.lingers = 5.0
    outcome = outcome_of(node, Cancel(50, 100))
    assert (outcome.error, outcome.columns) == ("still in flight 0.1 s after the client had hung up", {})


@pytest.mark.parametrize(
    ("answer", "error"),
    [(answer_in(0.1, 2, 0), "the answer was over too soon"), (FULL, "rejected: HTTP 429: no room")],
)
def test_an_answer_that_was_not_hung_up_on_has_no_release(answer: Script, error: str) -> None:
    outcome = outcome_of(ScriptedNode([answer]), Cancel(50, 100))
    assert (outcome.error, outcome.columns) == (error, {})


def test_nothing_is_hung_up_on_beside_other_requests() -> None:
    node = ScriptedNode([])
    node.in_flight = 2
    assert outcome_of(node, Cancel(50, 100)).error == "2 other requests are in flight"
    assert node.bodies == []


@pytest.mark.parametrize(
    ("entry", "spec"),
    [
        ({}, {"harness": "torch", "quant": "q6k", "devices": [1, 2], "tensor_parallel": 2}),
        ({"quant": None, "devices": [3]}, {"harness": "torch", "devices": [3]}),
        ({"harness": "llamacpp", "devices": []}, {"harness": "llamacpp", "quant": "q6k"}),
    ],
)
def test_a_model_is_loaded_again_as_it_was(entry: dict[str, Any], spec: dict[str, Any]) -> None:
    node = ScriptedNode([answer_in(0.8, 4, 0.1)], **entry)
    outcome = outcome_of(node, Swap(prompt_tokens=50, max_tokens=4))
    assert outcome.error is None
    assert node.told == [("unload", {"model_id": "m"}), ("load", {"model_id": "m", **spec})]
    assert outcome.columns == {"unload_s": exactly(UNLOAD_SECS), "load_s": exactly(LOAD_SECS)}
    (record,) = outcome.records
    assert (measure(record).ttft_s, record.completion_tokens) == (exactly(0.8), 4)


def test_a_model_that_does_not_come_back_is_told_with_how_it_was_loaded() -> None:
    node = ScriptedNode([])
    node.loads = False
    outcome = outcome_of(node, Swap(50, 4))
    assert outcome.error is not None
    for words in ("m is unloaded and did not load again", "'quant': 'q6k'", "'devices': [1, 2]", "HTTP 507"):
        assert words in outcome.error
    assert (node.bodies, outcome.columns) == ([], {})


@pytest.mark.parametrize("scenario", [Swap(50, 4), Cancel(50, 4)])
def test_what_needs_a_node_is_not_tried_elsewhere(scenario: Scenario) -> None:
    async def model() -> ServedModel:
        async with subject_of(ScriptedNode([])) as subject:
            return subject.model

    assert not scenario.suits(run(model()), None)
