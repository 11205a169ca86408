"""Scenarios against a node with known timings: conversations, mixed load, cancellation, swapping."""

from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from statistics import median
from typing import Any

import pytest

from bench.scripted_node import LOAD_SECS, UNLOAD_SECS, ScriptedNode, subject_of
from bench.scripted_server import Script, streamed_script
from bench.virtual_time import run
from helexa.bench.request_records_and_metrics import measure, measure_run
from helexa.bench.scenarios import single
from helexa.bench.scenarios.load import Agentic, Mixed
from helexa.bench.scenarios.scenario import Outcome, Scenario
from helexa.bench.scenarios.single import Cancel, Swap
from helexa.bench.servers import ServedModel

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
            assert scenario.key.kind != "agentic" or subject.clock.now() == last  # no tool runs after the last request
            return outcome

    return run(work())


def turn_script(number: int, at: float) -> Script:
    return streamed_script(0.5, 3, 0.1, "well ")


def test_each_turn_of_an_agent_sends_the_previous_messages_and_a_new_tool_result() -> None:
    node = ScriptedNode(turn_script)
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
        for previous, current in pairwise(turns):
            assert current[:-2] == previous
            assert current[-2] == {"role": "assistant", "content": "well well well "}
            assert current[-1]["content"].startswith("The tool returned: ")
    distributions = measure_run(outcome.records).distributions
    assert (distributions["ttft_s"].n, distributions["ttft_s"].max, distributions["tpot_s"].p50) == (
        6,
        exactly(0.5),
        exactly(0.1),
    )


def test_seed_determines_messages_and_send_times_and_salt_the_first_word() -> None:
    def messages_and_times(seed: int, salt: str) -> tuple[list[Any], list[float]]:
        node = ScriptedNode(turn_script)
        outcome_of(node, TALK, seed, salt)
        return [body["messages"] for body in node.bodies], node.arrived

    bodies, arrived = messages_and_times(1, "a")
    assert messages_and_times(1, "a") == (bodies, arrived)
    salted, salted_arrived = messages_and_times(1, "b")
    assert salted_arrived == arrived
    for place in (0, 1):
        (first_word, text), (other_word, other_text) = (
            messages[0][place]["content"].split(" ", 1) for messages in (bodies, salted)
        )
        assert (first_word != other_word, text == other_text) == (True, True)
    other_bodies, other_arrived = messages_and_times(2, "a")
    assert other_bodies[0] != bodies[0]
    assert other_arrived != arrived


def test_simulated_tool_durations_and_result_sizes_vary_around_the_median() -> None:
    node = ScriptedNode(turn_script)
    outcome = outcome_of(node, Agentic(1, 60, 60, tool_tokens=40, tool_secs=2.0, max_tokens=16))
    pauses = [current.sent - previous.ended for previous, current in pairwise(outcome.records)]
    sizes = [len(message["content"].split()) - 3 for message in node.bodies[-1]["messages"][3::2]]
    for values, middle in ((pauses, 2.0), (sizes, 40)):
        assert len(values) == 59
        assert median(values) == pytest.approx(middle, rel=0.2)
        assert (min(values) < 0.6 * middle, max(values) > 1.7 * middle) == (True, True)


def test_conversation_with_a_rejected_turn_yields_no_sample() -> None:
    """Without its longest turns, a conversation would make a server that rejects long prompts look fast."""
    node = ScriptedNode(lambda number, at: FULL if number == 20 else turn_script(number, at))
    outcome = outcome_of(node, Agentic(2, 15, 60, 20, 1.0, 16))
    assert Counter(record.status for record in outcome.records)["rejected"] == 1
    assert len(outcome.records) < 30
    assert outcome.error == "rejected: HTTP 429: no room"


def mixed_node(long: Callable[[float], Script], probe: Callable[[float], Script]) -> ScriptedNode:
    """Return a node that answers with `probe` or `long`, called with the seconds since the first request."""

    def script_for(number: int, at: float) -> Script:
        small = node.bodies[number]["max_tokens"] == 1
        return (probe if small else long)(at - node.arrived[0])

    node = ScriptedNode(script_for)
    return node


def test_mixed_load_measures_short_requests_that_long_prompts_delay() -> None:
    """Probes sent at 0, 0.5, 1 ... wait until 1.75, 3.75 ...: a quarter each waits 1.75, 1.25, 0.75 and 0.25 s."""
    node = mixed_node(
        long=lambda second: streamed_script(2.1, 5, 0),
        probe=lambda second: streamed_script(2 - (second + 0.25) % 2, 1, 0),
    )
    outcome = outcome_of(node, Mixed(prompt_tokens=400, duration_secs=8.0, max_tokens=5))
    assert outcome.error is None
    assert Counter(record.role for record in outcome.records) == {"load": 4, "probe": 16}
    assert outcome.measured is not None
    assert {record.role for record in outcome.measured} == {"probe"}
    distributions = measure_run(outcome.measured).distributions
    assert (distributions["ttft_s"].n, distributions["ttft_s"].p50, distributions["ttft_s"].max) == (
        16,
        exactly(1.0),
        exactly(1.75),
    )
    assert distributions["client_queue_s"].max == exactly(0.0)
    long = [record for record in outcome.records if record.role == "load"]
    assert [record.sent - long[0].sent for record in long] == exactly([0, 2.1, 4.2, 6.3])  # one at a time
    texts = [body["messages"][0]["content"] for body in node.bodies]
    assert len(set(texts)) == 20
    assert sorted(len(text.split()) > 390 for text in texts) == [False] * 16 + [True] * 4


@pytest.mark.parametrize(
    ("long", "probe", "error"),
    [(FULL, None, "rejected: HTTP 429: no room"), (None, FULL, "rejected: HTTP 429: no room"), (None, BROKEN, "error")],
)
def test_mixed_load_with_failed_prompts_or_probes_yields_no_sample(
    long: Script | None, probe: Script | None, error: str
) -> None:
    fine = streamed_script(0.5, 1, 0)
    node = mixed_node(lambda second: long or fine, lambda second: probe or fine)
    assert str(outcome_of(node, Mixed(400, 2.0, 5)).error).startswith(error)


def test_cancel_scenario_measures_the_time_until_the_server_releases_the_request() -> None:
    node = ScriptedNode([streamed_script(0.5, 100, 0.1)])
    node.release_delay = 1.0
    outcome = outcome_of(node, Cancel(prompt_tokens=50, max_tokens=100))
    assert outcome.error is None
    (record,) = outcome.records
    assert (record.status, len(record.deltas)) == ("cancelled", 3)
    assert outcome.columns["release_s"] == pytest.approx(1.0, rel=0.02)
    assert [moment - node.arrived[0] for moment in node.disconnects] == exactly([0.7])


def test_cancel_scenario_reports_a_request_that_is_not_released(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(single, "_MAX_RELEASE_SECS", 0.1)
    node = ScriptedNode([streamed_script(0.5, 100, 0.1)])
    node.release_delay = 5.0
    outcome = outcome_of(node, Cancel(50, 100))
    assert (outcome.error, outcome.columns) == (
        "the request is still in flight 0.1 s after the disconnect; see the server's log",
        {},
    )


@pytest.mark.parametrize(
    ("script", "error"),
    [
        (streamed_script(0.1, 2, 0), "the answer ended within 3 chunks; raise the scenario's max_tokens"),
        (FULL, "rejected: HTTP 429: no room"),
    ],
)
def test_cancel_scenario_reports_an_error_if_the_answer_ends_before_the_cancel(script: Script, error: str) -> None:
    outcome = outcome_of(ScriptedNode([script]), Cancel(50, 100))
    assert (outcome.error, outcome.columns) == (error, {})


def test_cancel_scenario_does_not_run_while_other_clients_have_requests() -> None:
    node = ScriptedNode([])
    node.in_flight = 2
    assert (
        outcome_of(node, Cancel(50, 100)).error
        == "2 requests of other clients are in flight; measure when the server is idle"
    )
    assert node.bodies == []


@pytest.mark.parametrize(
    ("entry", "spec"),
    [
        ({}, {"harness": "torch", "quant": "q6k", "devices": [1, 2], "tensor_parallel": 2}),
        ({"quant": None, "devices": [3]}, {"harness": "torch", "devices": [3]}),
        ({"harness": "llamacpp", "devices": []}, {"harness": "llamacpp", "quant": "q6k"}),
        (
            {"quant": None, "devices": [], "tensor_parallel": 2},
            {"harness": "torch", "tensor_parallel": 2},
        ),
    ],
)
def test_swap_scenario_reloads_the_model_with_the_same_load_options(
    entry: dict[str, Any], spec: dict[str, Any]
) -> None:
    node = ScriptedNode([streamed_script(0.8, 4, 0.1)], **entry)
    outcome = outcome_of(node, Swap(prompt_tokens=50, max_tokens=4))
    assert outcome.error is None
    assert node.commands == [("unload", {"model_id": "m"}), ("load", {"model_id": "m", **spec})]
    assert outcome.columns == {"unload_s": exactly(UNLOAD_SECS), "load_s": exactly(LOAD_SECS)}
    (record,) = outcome.records
    assert (measure(record).ttft_s, record.completion_tokens) == (exactly(0.8), 4)


def test_error_of_a_failed_reload_names_the_load_options() -> None:
    node = ScriptedNode([])
    node.load_succeeds = False
    outcome = outcome_of(node, Swap(50, 4))
    assert outcome.error is not None
    for detail in ("m was unloaded and did not load again", "'quant': 'q6k'", "'devices': [1, 2]", "HTTP 507"):
        assert detail in outcome.error
    assert (node.bodies, outcome.columns) == ([], {})


@pytest.mark.parametrize("scenario", [Swap(50, 4), Cancel(50, 4)])
def test_swap_and_cancel_scenarios_do_not_run_against_servers_other_than_nodes(scenario: Scenario) -> None:
    async def model() -> ServedModel:
        async with subject_of(ScriptedNode([])) as subject:
            return subject.model

    assert not scenario.suits(run(model()), None)
