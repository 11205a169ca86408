"""Every metric, measured against a server whose timings are known."""

from pathlib import Path
from typing import Any

import pytest

from bench.scripted_server import (
    DONE,
    ROLE,
    Script,
    ScriptedServer,
    Step,
    client_of,
    delta_chunk,
    finish_chunk,
    streamed_script,
    usage_chunk,
)
from bench.virtual_time import run
from helexa.bench.prompts_and_load_generators import PromptRequest, Turn, arrival_times, closed_loop, open_loop
from helexa.bench.request_records_and_metrics import Objectives, RequestMeasures, RequestRecord, measure, measure_run

PROMPT = PromptRequest("m", [Turn("user", "hello")], max_tokens=64)


def exactly(seconds: float) -> Any:
    return pytest.approx(seconds, rel=1e-6, abs=1e-6)


def record_of(script: Script, kind: Any = "openai", **options: Any) -> RequestRecord:
    async def ask() -> RequestRecord:
        async with client_of(ScriptedServer([script]), kind, **options) as client:
            return await client.ask(PROMPT)

    return run(ask())


def record_and_measures(*steps: Step, **options: Any) -> tuple[RequestRecord, RequestMeasures]:
    record = record_of(Script(steps), **options)
    assert record.status == "ok", record.error
    return record, measure(record)


def test_measured_times_and_rates_of_a_chat_stream_are_exact() -> None:
    _, measures = record_and_measures(
        Step(0, [ROLE]),
        Step(0.8, [delta_chunk("a")]),
        *(Step(0.05, [delta_chunk("b")]) for _ in range(9)),
        Step(0.5, [finish_chunk()]),
        Step(0.5, [usage_chunk(100, 10), DONE]),
    )
    assert measures.ttft_s == exactly(0.8)
    assert measures.ttfo_s == exactly(0.8)
    assert measures.e2e_s == exactly(0.8 + 9 * 0.05)  # up to the last token, not the last byte
    assert measures.tpot_s == exactly(0.05)
    assert measures.ntpot_s == exactly(1.25 / 10)
    assert measures.output_tps_user == exactly(20)
    assert measures.icl_s == pytest.approx([0.05] * 9)
    assert measures.itl_s == []
    assert measures.prefill_tps == exactly(100 / 0.8)
    assert measures.prefill_estimated
    assert not measures.estimated


def test_empty_deltas_and_comments_do_not_count_as_tokens() -> None:
    _, measures = record_and_measures(
        Step(0.1, [ROLE]),
        Step(0.1, [delta_chunk(reasoning_content="")]),
        Step(0.1, [{"choices": []}]),
        Step(0.7, [delta_chunk("a")]),
        Step(1.0, [delta_chunk("b"), finish_chunk(), usage_chunk(5, 2), DONE]),
    )
    assert measures.ttft_s == exactly(1.0)
    assert measures.tpot_s == exactly(1.0)


def test_reasoning_counts_for_time_to_first_token_but_not_for_time_to_first_output() -> None:
    record, measures = record_and_measures(
        *(Step(0.2, [delta_chunk(reasoning_content="hm")]) for _ in range(10)),
        *(Step(0.1, [delta_chunk("so")]) for _ in range(5)),
        Step(0, [usage_chunk(50, 15, completion_tokens_details={"reasoning_tokens": 10}), finish_chunk(), DONE]),
    )
    assert measures.ttft_s == exactly(0.2)
    assert measures.ttfo_s == exactly(2.1)
    assert measures.e2e_s == exactly(2.5)
    assert measures.tpot_s == exactly(2.3 / 14)
    assert (record.reasoning_tokens, record.text) == (10, "so" * 5)
    assert [delta.kind for delta in record.deltas] == ["reasoning"] * 10 + ["text"] * 5


def test_decode_rate_excludes_reasoning_tokens_that_the_server_does_not_stream() -> None:
    """The server counts 1,000 reasoning tokens that it does not stream, then streams 11 tokens."""
    record, measures = record_and_measures(
        Step(5.0, [delta_chunk("so")]),
        *(Step(0.1, [delta_chunk("so")]) for _ in range(10)),
        Step(0, [usage_chunk(50, 1011, completion_tokens_details={"reasoning_tokens": 1000}), finish_chunk(), DONE]),
    )
    assert measures.tpot_s == exactly(0.1)
    assert measures.output_tps_user == exactly(10)
    assert measures.ntpot_s == exactly(6.0 / 1011)
    assert (measures.completion_tokens, record.reasoning_tokens) == (1011, 1000)


def test_decode_rate_is_measured_only_if_tokens_arrive_over_at_least_200_ms() -> None:
    _, measures = record_and_measures(
        Step(1, [delta_chunk("a")]), Step(0.19, [delta_chunk("b"), finish_chunk(), usage_chunk(10, 100), DONE])
    )
    assert (measures.tpot_s, measures.output_tps_user) == (exactly(0.19 / 99), None)
    _, measures = record_and_measures(
        Step(1, [delta_chunk("a")]), Step(0.21, [delta_chunk("b"), finish_chunk(), usage_chunk(10, 100), DONE])
    )
    assert measures.output_tps_user == exactly(99 / 0.21)


def test_stream_of_a_single_chunk_has_no_time_per_output_token() -> None:
    _, measures = record_and_measures(Step(1, [delta_chunk("a b c"), finish_chunk(), usage_chunk(10, 3), DONE]))
    assert (measures.tpot_s, measures.output_tps_user, measures.ntpot_s) == (None, None, exactly(1 / 3))


def test_answer_cut_off_in_its_reasoning_has_no_time_to_first_output() -> None:
    _, measures = record_and_measures(
        Step(0.5, [delta_chunk(reasoning="hm")]), Step(0.5, [finish_chunk("length"), usage_chunk(5, 1), DONE])
    )
    assert (measures.ttft_s, measures.ttfo_s) == (exactly(0.5), None)


def test_deltas_of_tool_calls_count_as_generated_output() -> None:
    def call(**function: str) -> dict[str, Any]:
        return delta_chunk(tool_calls=[{"index": 0, "function": function}])

    record, measures = record_and_measures(
        Step(0.4, [call(name="add", arguments="")]),
        Step(0.1, [call(arguments='{"a"')]),
        Step(0.1, [call(arguments=": 1}")]),
        Step(0, [finish_chunk("tool_calls"), usage_chunk(5, 8), DONE]),
    )
    assert measures.ttft_s == measures.ttfo_s == exactly(0.4)
    assert measures.tpot_s == exactly(0.2 / 7)
    assert [(call.name, call.arguments) for call in record.tool_calls] == [("add", '{"a": 1}')]


def test_time_per_output_token_counts_all_tokens_of_a_chunk_with_several() -> None:
    """TPOT is computed from the token count, inter-chunk latency from the chunks' times."""
    _, measures = record_and_measures(
        Step(0.6, [delta_chunk("one two three four ")]),
        *(Step(0.2, [delta_chunk("one two three four ")]) for _ in range(4)),
        Step(0, [finish_chunk(), usage_chunk(10, 20), DONE]),
    )
    assert measures.tpot_s == exactly(0.8 / 19)
    assert measures.icl_s == pytest.approx([0.2] * 4)


def test_inter_token_latency_is_measured_if_each_chunk_has_usage() -> None:
    def counted(text: str, total: int) -> dict[str, Any]:
        return delta_chunk(text) | {"usage": {"prompt_tokens": 10, "completion_tokens": total}}

    _, measures = record_and_measures(
        Step(0.5, [counted("a b c ", 3)]),
        Step(0.3, [counted("d e f ", 6)]),
        Step(0.2, [counted("g ", 7)]),
        Step(0, [finish_chunk(), usage_chunk(10, 7), DONE]),
    )
    assert measures.itl_s == pytest.approx([0.1, 0.1, 0.1, 0.2])
    assert measures.icl_s == pytest.approx([0.3, 0.2])


def test_tokens_that_arrive_in_bursts_do_not_change_the_mean_time_per_token() -> None:
    """Events that arrive together have an inter-chunk latency of 0; the mean time per token is unchanged."""
    _, measures = record_and_measures(
        Step(0.5, [delta_chunk("a")]),
        *(Step(0.4, [delta_chunk("b"), delta_chunk("c"), delta_chunk("d"), delta_chunk("e")]) for _ in range(5)),
        Step(0, [finish_chunk(), usage_chunk(10, 21), DONE]),
    )
    assert measures.tpot_s == exactly(2.0 / 20)
    assert sorted(measures.icl_s) == pytest.approx([0.0] * 15 + [0.4] * 5)


def test_prefill_and_queue_times_are_taken_from_the_server_timings() -> None:
    timing = {"prefill_ms": 500, "decode_ms": 900, "prefill_tokens": 40}
    record, measures = record_and_measures(
        Step(0.75, [delta_chunk("a")]),
        Step(0.25, [delta_chunk("b"), finish_chunk(), usage_chunk(100, 2, helexa_timing=timing), DONE]),
    )
    assert record.cached_tokens == 60
    assert measures.prefill_tps == exactly(40 / 0.5)
    assert not measures.prefill_estimated
    assert measures.queue_s == exactly(0.25)


def test_prefill_rate_excludes_cached_prompt_tokens() -> None:
    _, measures = record_and_measures(
        Step(
            0.5,
            [
                delta_chunk("a"),
                finish_chunk(),
                usage_chunk(1000, 1, prompt_tokens_details={"cached_tokens": 900}),
                DONE,
            ],
        )
    )
    assert measures.prefill_tps == exactly(200)
    assert measures.tpot_s is None


def test_timings_in_the_format_of_llama_cpp_are_used() -> None:
    timings = {"prompt_ms": 250.0, "predicted_ms": 100.0, "cache_n": 20}
    record, measures = record_and_measures(
        Step(0.5, [delta_chunk("a")]), Step(0, [finish_chunk() | {"timings": timings}, usage_chunk(70, 1), DONE])
    )
    assert (record.prefill_s, record.decode_s, record.cached_tokens) == (0.25, 0.1, 20)
    assert measures.prefill_tps == exactly(200)


def test_without_usage_each_chunk_counts_as_one_token_and_the_count_is_marked_as_estimated() -> None:
    _, measures = record_and_measures(
        Step(0.5, [delta_chunk("a")]), Step(0.1, [delta_chunk("b"), finish_chunk(), DONE])
    )
    assert (measures.completion_tokens, measures.estimated, measures.prefill_tps) == (2, True, None)


def test_measured_times_and_rates_of_a_messages_stream_are_exact() -> None:
    def delta(index: int, **body: Any) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": index, "delta": body}

    start = {"usage": {"input_tokens": 30, "cache_read_input_tokens": 60, "cache_creation_input_tokens": 10}}
    call = {"type": "tool_use", "id": "t", "name": "add", "input": {}}
    record, measures = record_and_measures(
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
    assert (measures.ttft_s, measures.ttfo_s, measures.e2e_s) == (exactly(0.5), exactly(1.0), exactly(1.5))
    assert measures.tpot_s == exactly(0.1)
    assert (record.prompt_tokens, record.cached_tokens, record.completion_tokens) == (100, 60, 11)
    assert (record.text, record.finish_reason) == ("so", "tool_use")
    assert [(call.name, call.arguments) for call in record.tool_calls] == [("add", '{"a": 1}')]


@pytest.mark.parametrize(
    ("script", "status", "reason"),
    [
        (Script(status=429, body={"error": {"message": "slow down"}}), "rejected", "HTTP 429: slow down"),
        (Script(status=503, body={"error": "busy"}), "rejected", "HTTP 503: busy"),
        (Script(status=400, body={"error": {"message": "no"}}), "error", "HTTP 400: no"),
        (Script([Step(0.5, [delta_chunk("a")])], disconnects=True), "incomplete", "Client"),
        (Script([Step(0.5, [delta_chunk("a")])]), "incomplete", "ended before the answer was complete"),
        (Script([Step(0.5, [delta_chunk("a")]), Step(0, ["{"])]), "incomplete", "not JSON"),
        (Script([Step(0.5, [delta_chunk("a"), {"error": {"message": "fault"}}])]), "incomplete", "fault"),
        (Script([Step(0.5, [delta_chunk("a")]), Step(99, [DONE])]), "timeout", "after 10 s"),
    ],
)
def test_each_kind_of_failed_request_has_its_own_status(script: Script, status: str, reason: str) -> None:
    record = record_of(script, timeout_secs=10.0)
    assert (record.status, reason in (record.error or "")) == (status, True), record.error
    begun = bool(script.steps)
    assert [delta.at - record.sent for delta in record.deltas] == ([exactly(0.5)] if begun else [])
    assert record.ended - record.sent == exactly({"timeout": 10.0}.get(status, 0.5 if begun else 0.0))


def test_tokens_received_before_a_stream_broke_count_in_the_throughput() -> None:
    measures = measure_run(
        [record_of(Script([Step(0.5, [delta_chunk("a")]), Step(0.5, [delta_chunk("b")])], disconnects=True))]
    )
    assert (measures.incomplete, measures.completed, measures.estimated) == (1, 0, True)
    assert measures.totals["output_tps"] == exactly(2.0)
    assert measures.distributions == {}


def test_failed_connection_is_recorded_as_an_error() -> None:
    async def ask() -> RequestRecord:
        async with client_of(ScriptedServer([])) as client:
            Path(client.session.connector.path).unlink()  # type: ignore[union-attr]
            return await client.ask(PROMPT)

    assert run(ask()).status == "error"


def test_throughput_and_goodput_of_a_load_with_failed_requests_are_exact() -> None:
    """Ten requests a second apart: six within the objectives, two too slow, one rejected, one failed."""
    scripts = [
        *[streamed_script(0.5, 11, 0.05)] * 6,
        *[streamed_script(2.0, 11, 0.05)] * 2,
        Script(status=429),
        Script(status=500),
    ]

    async def load() -> list[RequestRecord]:
        async with client_of(ScriptedServer(scripts)) as client:
            loop = await open_loop(lambda due: client.ask(PROMPT, scheduled=due), range(10), client.clock)
            return loop.records

    measures = measure_run(run(load()), Objectives(ttft_s=1.0, tpot_s=0.1))
    assert (measures.requests, measures.completed, measures.rejected, measures.failed) == (10, 8, 1, 1)
    assert measures.totals["goodput_share"] == exactly(0.6)
    duration = 7 + 2.5  # from the start of the first request to the end of the eighth
    assert measures.totals["goodput_rps"] == exactly(6 / duration)
    assert measures.totals["output_tps"] == exactly(88 / duration)
    assert measures.distributions["ttft_s"].n == 8
    assert measures.distributions["ttft_s"].p50 == exactly(0.5)
    assert measures.distributions["ttft_s"].p95 == exactly(2.0)
    assert measures.distributions["ttft_s"].p99 is None


def test_closed_loop_load_sends_the_next_request_of_a_user_when_the_last_one_ends() -> None:
    async def load() -> list[RequestRecord]:
        async with client_of(ScriptedServer(lambda number, at: streamed_script(0.5, 11, 0.05))) as client:
            return await closed_loop(lambda due: client.ask(PROMPT, scheduled=due), 4, 9.5, client.clock)

    records = run(load())
    measures = measure_run(records)
    assert len(records) == 40  # each of the four users sends a request every second until 9.5 s
    assert measures.totals["output_tps"] == exactly(44)
    assert measures.distributions["tpot_s"].p95 == exactly(0.05)


def test_open_loop_load_stays_on_schedule_and_counts_the_waits_for_a_frozen_server() -> None:
    """Requests are sent on schedule while the server is frozen from second 10 to 20, and their waits are counted."""

    def frozen(number: int, at: float) -> Script:
        second = at - 1000.0
        return streamed_script(0.1 if not 10 <= second < 20 else 20.1 - second, 1, 0)

    async def load() -> list[RequestRecord]:
        async with client_of(ScriptedServer(frozen)) as client:
            due = [number / 10 for number in range(1000)]
            return (await open_loop(lambda at: client.ask(PROMPT, scheduled=at), due, client.clock)).records

    records = run(load())
    distributions = measure_run(records).distributions
    assert len(records) == 1000
    assert distributions["client_queue_s"].max == exactly(0.0)
    # A tenth of all requests fell into the freeze; their additional wait is uniform from 0.1 to 10 s.
    assert distributions["scheduled_ttft_s"].p50 == exactly(0.1)
    assert distributions["scheduled_ttft_s"].p95 == pytest.approx(5.1, rel=0.02)
    assert distributions["scheduled_ttft_s"].p99 == pytest.approx(9.1, rel=0.02)
    assert distributions["scheduled_ttft_s"].max == exactly(10.1)


def test_scheduled_ttft_includes_the_delay_of_the_client_and_plain_ttft_does_not() -> None:
    """The client sends the request 2 s after its scheduled time, and the first token arrives after another 0.5 s."""

    async def load() -> RequestRecord:
        async with client_of(ScriptedServer([streamed_script(0.5, 2, 0.1)])) as client:
            return await client.ask(PROMPT, scheduled=client.clock.now() - 2.0)

    measures = measure(run(load()))
    assert (measures.client_queue_s, measures.ttft_s, measures.scheduled_ttft_s) == (
        exactly(2.0),
        exactly(0.5),
        exactly(2.5),
    )
    assert measures.scheduled_e2e_s == exactly(2.6)


def test_open_loop_load_stops_for_a_saturated_server_but_not_for_constant_high_latency() -> None:
    """A server of one request per second is saturated at two per second; a constant latency of 10 s is not."""

    def queueing(number: int, at: float) -> Script:
        return streamed_script(1000.0 + number + 1 - at, 1, 0)

    async def load(scripts: Any, rate: float) -> tuple[int, bool]:
        async with client_of(ScriptedServer(scripts)) as client:
            due = list(arrival_times(rate, 200, "constant", 0))
            loop = await open_loop(lambda at: client.ask(PROMPT, scheduled=at), due, client.clock)
            return len(loop.records), loop.saturated

    sent, saturated = run(load(queueing, 2.0))
    assert saturated
    assert sent < 60
    assert run(load(lambda number, at: streamed_script(10.0, 1, 0), 2.0)) == (400, False)


def test_rejected_requests_mark_the_server_as_saturated() -> None:
    async def load() -> bool:
        async with client_of(ScriptedServer(lambda number, at: Script(status=429))) as client:
            return (await open_loop(lambda at: client.ask(PROMPT, scheduled=at), range(5), client.clock)).saturated

    assert run(load())


def test_canceled_benchmark_request_closes_its_connection() -> None:
    server = ScriptedServer([streamed_script(0.5, 100, 0.1)])

    async def ask() -> RequestRecord:
        async with client_of(server) as client:
            record = await client.ask(PROMPT, cancel_after=3)
            await client.clock.sleep_until(client.clock.now() + 1)
            return record

    record = run(ask())
    assert (record.status, len(record.deltas)) == ("cancelled", 3)
    assert record.ended - record.sent == exactly(0.7)
    assert server.disconnects  # the server noticed the closed connection


def test_request_body_contains_the_settings_of_the_benchmark_prompt() -> None:
    server = ScriptedServer([streamed_script(0.1, 1, 0)] * 2)

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
