"""Every metric against a server whose timings are known: within 2 % of the truth, and in fact exact."""

from pathlib import Path
from typing import Any

import pytest

from bench.scripted_server import (
    DONE,
    ROLE,
    Script,
    ScriptedServer,
    Step,
    answer_in,
    client_of,
    ended,
    said,
    usage,
)
from bench.virtual_time import run
from helexa.bench.measurement.load import arrival_times, closed_loop, open_loop
from helexa.bench.measurement.measures import Objectives, RequestMeasures, measure, measure_run
from helexa.bench.measurement.prompt_request import PromptRequest, Turn
from helexa.bench.measurement.request_record import RequestRecord

ASKED = PromptRequest("m", [Turn("user", "hello")], max_tokens=64)


def exactly(seconds: float) -> Any:
    return pytest.approx(seconds, rel=1e-6, abs=1e-6)


def asked(script: Script, kind: Any = "openai", **options: Any) -> RequestRecord:
    async def ask() -> RequestRecord:
        async with client_of(ScriptedServer([script]), kind, **options) as client:
            return await client.ask(ASKED)

    return run(ask())


def measured(*steps: Step, **options: Any) -> tuple[RequestRecord, RequestMeasures]:
    record = asked(Script(steps), **options)
    assert record.status == "ok", record.error
    return record, measure(record)


def test_a_plain_stream() -> None:
    _, found = measured(
        Step(0, [ROLE]),
        Step(0.8, [said("a")]),
        *(Step(0.05, [said("b")]) for _ in range(9)),
        Step(0.5, [ended()]),
        Step(0.5, [usage(100, 10), DONE]),
    )
    assert found.ttft_s == exactly(0.8)
    assert found.ttfo_s == exactly(0.8)
    assert found.e2e_s == exactly(0.8 + 9 * 0.05)  # the last token ends it, not the last byte
    assert found.tpot_s == exactly(0.05)
    assert found.ntpot_s == exactly(1.25 / 10)
    assert found.output_tps_user == exactly(20)
    assert found.icl_s == pytest.approx([0.05] * 9)
    assert found.itl_s == []
    assert found.prefill_tps == exactly(100 / 0.8)
    assert found.prefill_estimated
    assert not found.estimated


def test_empty_deltas_and_comments_are_no_tokens() -> None:
    _, found = measured(
        Step(0.1, [ROLE]),
        Step(0.1, [said(reasoning_content="")]),
        Step(0.1, [{"choices": []}]),
        Step(0.7, [said("a")]),
        Step(1.0, [said("b"), ended(), usage(5, 2), DONE]),
    )
    assert found.ttft_s == exactly(1.0)
    assert found.tpot_s == exactly(1.0)


def test_reasoning_counts_as_tokens_and_not_as_output() -> None:
    record, found = measured(
        *(Step(0.2, [said(reasoning_content="hm")]) for _ in range(10)),
        *(Step(0.1, [said("so")]) for _ in range(5)),
        Step(0, [usage(50, 15, completion_tokens_details={"reasoning_tokens": 10}), ended(), DONE]),
    )
    assert found.ttft_s == exactly(0.2)
    assert found.ttfo_s == exactly(2.1)
    assert found.e2e_s == exactly(2.5)
    assert found.tpot_s == exactly(2.3 / 14)
    assert (record.reasoning_tokens, record.reasoning, record.text) == (10, "hm" * 10, "so" * 5)


def test_hidden_reasoning_is_not_in_the_decode_rate() -> None:
    """The server counts 1,000 reasoning tokens that it does not stream, then streams 11 tokens."""
    record, found = measured(
        Step(5.0, [said("so")]),
        *(Step(0.1, [said("so")]) for _ in range(10)),
        Step(0, [usage(50, 1011, completion_tokens_details={"reasoning_tokens": 1000}), ended(), DONE]),
    )
    assert found.tpot_s == exactly(0.1)
    assert found.output_tps_user == exactly(10)
    assert found.ntpot_s == exactly(6.0 / 1011)
    assert (found.completion_tokens, record.reasoning_tokens) == (1011, 1000)


def test_a_window_under_200_ms_gives_no_decode_rate() -> None:
    _, found = measured(Step(1, [said("a")]), Step(0.19, [said("b"), ended(), usage(10, 100), DONE]))
    assert (found.tpot_s, found.output_tps_user) == (exactly(0.19 / 99), None)
    _, found = measured(Step(1, [said("a")]), Step(0.21, [said("b"), ended(), usage(10, 100), DONE]))
    assert found.output_tps_user == exactly(99 / 0.21)


def test_an_answer_in_one_chunk_has_no_time_per_token() -> None:
    _, found = measured(Step(1, [said("a b c"), ended(), usage(10, 3), DONE]))
    assert (found.tpot_s, found.output_tps_user, found.ntpot_s) == (None, None, exactly(1 / 3))


def test_reasoning_that_never_ends_has_no_output() -> None:
    _, found = measured(Step(0.5, [said(reasoning="hm")]), Step(0.5, [ended("length"), usage(5, 1), DONE]))
    assert (found.ttft_s, found.ttfo_s) == (exactly(0.5), None)


def test_tool_calls_are_output() -> None:
    def call(**function: str) -> dict[str, Any]:
        return said(tool_calls=[{"index": 0, "function": function}])

    record, found = measured(
        Step(0.4, [call(name="add", arguments="")]),
        Step(0.1, [call(arguments='{"a"')]),
        Step(0.1, [call(arguments=": 1}")]),
        Step(0, [ended("tool_calls"), usage(5, 8), DONE]),
    )
    assert found.ttft_s == found.ttfo_s == exactly(0.4)
    assert found.tpot_s == exactly(0.2 / 7)
    assert [(one.name, one.arguments) for one in record.tool_calls] == [("add", '{"a": 1}')]


def test_several_tokens_a_chunk() -> None:
    """A chunk's gap is not a token's: TPOT follows the count, ICL the chunks."""
    _, found = measured(
        Step(0.6, [said("one two three four ")]),
        *(Step(0.2, [said("one two three four ")]) for _ in range(4)),
        Step(0, [ended(), usage(10, 20), DONE]),
    )
    assert found.tpot_s == exactly(0.8 / 19)
    assert found.icl_s == pytest.approx([0.2] * 4)


def test_tokens_counted_with_each_chunk_give_gaps_of_tokens() -> None:
    def counted(text: str, total: int) -> dict[str, Any]:
        return said(text) | {"usage": {"prompt_tokens": 10, "completion_tokens": total}}

    _, found = measured(
        Step(0.5, [counted("a b c ", 3)]),
        Step(0.3, [counted("d e f ", 6)]),
        Step(0.2, [counted("g ", 7)]),
        Step(0, [ended(), usage(10, 7), DONE]),
    )
    assert found.itl_s == pytest.approx([0.1, 0.1, 0.1, 0.2])
    assert found.icl_s == pytest.approx([0.3, 0.2])


def test_speculative_bursts() -> None:
    """Events that come together came together; the mean pace is unmoved by it."""
    _, found = measured(
        Step(0.5, [said("a")]),
        *(Step(0.4, [said("b"), said("c"), said("d"), said("e")]) for _ in range(5)),
        Step(0, [ended(), usage(10, 21), DONE]),
    )
    assert found.tpot_s == exactly(2.0 / 20)
    assert sorted(found.icl_s) == pytest.approx([0.0] * 15 + [0.4] * 5)


def test_a_server_that_tells_its_own_times() -> None:
    timing = {"prefill_ms": 500, "decode_ms": 900, "prefill_tokens": 40}
    record, found = measured(
        Step(0.75, [said("a")]),
        Step(0.25, [said("b"), ended(), usage(100, 2, helexa_timing=timing), DONE]),
    )
    assert record.cached_tokens == 60
    assert found.prefill_tps == exactly(40 / 0.5)
    assert not found.prefill_estimated
    assert found.queue_s == exactly(0.25)


def test_cached_tokens_are_not_prefilled() -> None:
    _, found = measured(
        Step(0.5, [said("a"), ended(), usage(1000, 1, prompt_tokens_details={"cached_tokens": 900}), DONE])
    )
    assert found.prefill_tps == exactly(200)
    assert found.tpot_s is None


def test_llama_cpp_tells_its_times_too() -> None:
    timings = {"prompt_ms": 250.0, "predicted_ms": 100.0, "cache_n": 20}
    record, found = measured(Step(0.5, [said("a")]), Step(0, [ended() | {"timings": timings}, usage(70, 1), DONE]))
    assert (record.prefill_s, record.decode_s, record.cached_tokens) == (0.25, 0.1, 20)
    assert found.prefill_tps == exactly(200)


def test_without_usage_chunks_are_counted_and_flagged() -> None:
    _, found = measured(Step(0.5, [said("a")]), Step(0.1, [said("b"), ended(), DONE]))
    assert (found.completion_tokens, found.estimated, found.prefill_tps) == (2, True, None)


def test_anthropic() -> None:
    def delta(index: int, **body: Any) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": index, "delta": body}

    start = {"usage": {"input_tokens": 30, "cache_read_input_tokens": 60, "cache_creation_input_tokens": 10}}
    call = {"type": "tool_use", "id": "t", "name": "add", "input": {}}
    record, found = measured(
        Step(0, [{"type": "message_start", "message": start}]),
        Step(0.2, [{"type": "ping"}]),
        Step(0.3, [delta(0, type="thinking_delta", thinking="hm")]),
        Step(0.5, [delta(1, type="text_delta", text="so")]),
        Step(0.25, [{"type": "content_block_start", "index": 2, "content_block": call}]),
        Step(0.25, [delta(2, type="input_json_delta", partial_json='{"a": 1}')]),
        Step(0.1, [{"type": "message_delta", "delta": {"stop_reason": "tool_use"}, "usage": {"output_tokens": 11}}]),
        Step(0, [{"type": "message_stop"}]),
        kind="anthropic",
    )
    assert (found.ttft_s, found.ttfo_s, found.e2e_s) == (exactly(0.5), exactly(1.0), exactly(1.5))
    assert found.tpot_s == exactly(0.1)
    assert (record.prompt_tokens, record.cached_tokens, record.completion_tokens) == (100, 60, 11)
    assert (record.text, record.reasoning, record.finish_reason) == ("so", "hm", "tool_use")
    assert [(one.name, one.arguments) for one in record.tool_calls] == [("add", '{"a": 1}')]


@pytest.mark.parametrize(
    ("script", "status", "reason"),
    [
        (Script(status=429, body={"error": {"message": "slow down"}}), "rejected", "HTTP 429: slow down"),
        (Script(status=503, body={"error": "busy"}), "rejected", "HTTP 503: busy"),
        (Script(status=400, body={"error": {"message": "no"}}), "error", "HTTP 400: no"),
        (Script([Step(0.5, [said("a")])], dies=True), "incomplete", "Client"),
        (Script([Step(0.5, [said("a")])]), "incomplete", "ended before the answer did"),
        (Script([Step(0.5, [said("a")]), Step(0, ["{"])]), "incomplete", "not JSON"),
        (Script([Step(0.5, [said("a"), {"error": {"message": "fault"}}])]), "incomplete", "fault"),
        (Script([Step(0.5, [said("a")]), Step(99, [DONE])]), "timeout", "after 10 s"),
    ],
)
def test_failures_are_told_apart(script: Script, status: str, reason: str) -> None:
    record = asked(script, timeout_secs=10.0)
    assert (record.status, reason in (record.error or "")) == (status, True), record.error
    begun = bool(script.steps)
    assert [delta.at - record.sent for delta in record.deltas] == ([exactly(0.5)] if begun else [])
    assert record.ended - record.sent == exactly({"timeout": 10.0}.get(status, 0.5 if begun else 0.0))


def test_a_failed_stream_still_tells_what_came() -> None:
    measures = measure_run([asked(Script([Step(0.5, [said("a")]), Step(0.5, [said("b")])], dies=True))])
    assert (measures.incomplete, measures.completed, measures.estimated) == (1, 0, True)
    assert measures.totals["output_tps"] == exactly(2.0)
    assert measures.distributions == {}


def test_nobody_listens() -> None:
    async def ask() -> RequestRecord:
        async with client_of(ScriptedServer([])) as client:
            Path(client.session.connector.path).unlink()  # type: ignore[union-attr]
            return await client.ask(ASKED)

    assert run(ask()).status == "error"


def test_throughput_and_goodput_count_failures() -> None:
    """Ten requests a second apart: six good ones, two slow ones, a refusal and an error."""
    scripts = [
        *[answer_in(0.5, 11, 0.05)] * 6,
        *[answer_in(2.0, 11, 0.05)] * 2,
        Script(status=429),
        Script(status=500),
    ]

    async def load() -> list[RequestRecord]:
        async with client_of(ScriptedServer(scripts)) as client:
            loop = await open_loop(lambda due: client.ask(ASKED, scheduled=due), range(10), client.clock)
            return loop.records

    found = measure_run(run(load()), Objectives(ttft_s=1.0, tpot_s=0.1))
    assert (found.requests, found.completed, found.rejected, found.failed) == (10, 8, 1, 1)
    assert found.totals["goodput_share"] == exactly(0.6)
    span = 7 + 2.5  # the eighth ends last; the two failures are over at once
    assert found.totals["goodput_rps"] == exactly(6 / span)
    assert found.totals["output_tps"] == exactly(88 / span)
    assert found.distributions["ttft_s"].n == 8
    assert found.distributions["ttft_s"].p50 == exactly(0.5)
    assert found.distributions["ttft_s"].p95 == exactly(2.0)
    assert found.distributions["ttft_s"].p99 is None


def test_a_closed_loop_keeps_its_users_busy() -> None:
    async def load() -> list[RequestRecord]:
        async with client_of(ScriptedServer(lambda number, at: answer_in(0.5, 11, 0.05))) as client:
            return await closed_loop(lambda due: client.ask(ASKED, scheduled=due), 4, 9.5, client.clock)

    records = run(load())
    found = measure_run(records)
    assert len(records) == 40  # each of the four asks every second, and none begins after 9.5 s
    assert found.totals["output_tps"] == exactly(44)
    assert found.distributions["tpot_s"].p95 == exactly(0.05)


def test_no_coordinated_omission() -> None:
    """A server that stands still from second 10 to second 20 is asked all the while, and each who asked waits."""

    def frozen(number: int, at: float) -> Script:
        second = at - 1000.0
        return answer_in(0.1 if not 10 <= second < 20 else 20.1 - second, 1, 0)

    async def load() -> list[RequestRecord]:
        async with client_of(ScriptedServer(frozen)) as client:
            due = [number / 10 for number in range(1000)]
            return (await open_loop(lambda at: client.ask(ASKED, scheduled=at), due, client.clock)).records

    records = run(load())
    found = measure_run(records).distributions
    assert len(records) == 1000
    assert found["client_queue_s"].max == exactly(0.0)
    # A tenth of all requests met the freeze, and waited 0.1 to 10 s longer, evenly.
    assert found["scheduled_ttft_s"].p50 == exactly(0.1)
    assert found["scheduled_ttft_s"].p95 == pytest.approx(5.1, rel=0.02)
    assert found["scheduled_ttft_s"].p99 == pytest.approx(9.1, rel=0.02)
    assert found["scheduled_ttft_s"].max == exactly(10.1)


def test_a_late_client_is_told_apart_from_a_slow_server() -> None:
    """Where the client itself is late, latency from the schedule has its lateness too."""

    async def load() -> RequestRecord:
        async with client_of(ScriptedServer([answer_in(0.5, 2, 0.1)])) as client:
            return await client.ask(ASKED, scheduled=client.clock.now() - 2.0)

    found = measure(run(load()))
    assert (found.client_queue_s, found.ttft_s, found.scheduled_ttft_s) == (exactly(2.0), exactly(0.5), exactly(2.5))
    assert found.scheduled_e2e_s == exactly(2.6)


def test_saturation_stops_an_open_loop_and_patience_does_not() -> None:
    """A server that answers one request a second falls behind at two; at a steady ten seconds each, it does not."""

    def queueing(number: int, at: float) -> Script:
        return answer_in(1000.0 + number + 1 - at, 1, 0)

    async def load(scripts: Any, rate: float) -> tuple[int, bool]:
        async with client_of(ScriptedServer(scripts)) as client:
            due = list(arrival_times(rate, 200, "constant", 0))
            loop = await open_loop(lambda at: client.ask(ASKED, scheduled=at), due, client.clock)
            return len(loop.records), loop.saturated

    sent, saturated = run(load(queueing, 2.0))
    assert saturated
    assert sent < 60
    assert run(load(lambda number, at: answer_in(10.0, 1, 0), 2.0)) == (400, False)


def test_refusals_saturate() -> None:
    async def load() -> bool:
        async with client_of(ScriptedServer(lambda number, at: Script(status=429))) as client:
            return (await open_loop(lambda at: client.ask(ASKED, scheduled=at), range(5), client.clock)).saturated

    assert run(load())


def test_cancelling_hangs_up() -> None:
    server = ScriptedServer([answer_in(0.5, 100, 0.1)])

    async def ask() -> RequestRecord:
        async with client_of(server) as client:
            record = await client.ask(ASKED, cancel_after=3)
            await client.clock.sleep_until(client.clock.now() + 1)
            return record

    record = run(ask())
    assert (record.status, len(record.deltas)) == ("cancelled", 3)
    assert record.ended - record.sent == exactly(0.7)
    assert server.gone  # the server was told


def test_what_is_asked() -> None:
    server = ScriptedServer([answer_in(0.1, 1, 0)] * 2)

    async def ask() -> None:
        async with client_of(server, bearer="key", ignore_eos=True) as client:
            await client.ask(PromptRequest("m", [Turn("system", "be"), Turn("user", "hi")], 7, fixed_length=True))
            await client.ask(PromptRequest("m", [Turn("user", "hi")], 7, schema={"type": "object"}))

    run(ask())
    first, second = server.bodies
    assert first == {
        "model": "m",
        "messages": [{"role": "system", "content": "be"}, {"role": "user", "content": "hi"}],
        "max_tokens": 7,
        "temperature": 1,
        "top_p": 1,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }
    assert second["response_format"]["json_schema"]["schema"] == {"type": "object"}
    assert "ignore_eos" not in second
    assert second["temperature"] == 0
    assert {headers["Authorization"] for headers in server.headers} == {"Bearer key"}
