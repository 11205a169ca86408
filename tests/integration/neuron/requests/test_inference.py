import asyncio
import logging
from contextlib import aclosing

import msgspec
import pytest

from helexa.core.errors import ApiError
from helexa.core.wire.request import GenerationRequest
from helexa.neuron.config import AdmissionConfig, TorchConfig
from helexa.neuron.engine.ipc.messages import Generate, TokenOutput
from helexa.neuron.lifecycle.served_model_and_context_limit import ServedModel
from helexa.neuron.output_events import Failed, Finished, InferenceEvent, Started, TextDelta
from helexa.neuron.requests.inference import run
from helexa.neuron.requests.sampling_and_context_limit import output_limit, sampling_params
from neuron.fake_models import until
from neuron.scripted_engine import CONTEXT, END, TIMING, TOKENIZER, Say, answer, endless, failing, scripted_model


def request(**fields: object) -> GenerationRequest:
    return GenerationRequest(model="m", **fields)  # type: ignore[arg-type]


async def events_of(model: ServedModel, prompt: list[int], **fields: object) -> list[InferenceEvent]:
    async with aclosing(run(model, [prompt], request(**fields))) as events:
        return [event async for event in events]


def text_of(events: list[InferenceEvent]) -> str:
    return "".join(event.text for event in events if isinstance(event, TextDelta))


def completions(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.getMessage().startswith("completed ")]


@pytest.fixture(autouse=True)
def logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "helexa")


async def test_inference_yields_started_then_text_then_finished_events(caplog: pytest.LogCaptureFixture) -> None:
    model = scripted_model(answer("Grüße, 🦊!"))
    events = await events_of(model, [1, 2, 3])
    assert events[0] == Started(3)
    assert text_of(events) == "Grüße, 🦊!"
    assert all("\ufffd" not in event.text and event.text for event in events[1:-1] if isinstance(event, TextDelta))
    tokens = len("Grüße, 🦊!".encode()) + 1
    assert events[-1] == Finished(
        reason="stop",
        prompt_tokens=3,
        cached_tokens=0,
        completion_tokens=tokens,
        prefill_ms=TIMING.prefill_ms,
        decode_ms=TIMING.decode_ms,
    )
    (line,) = completions(caplog)
    for part in ("prompt_tokens=3", f"completion_tokens={tokens}", "finish_reason=stop", "client_gone=False"):
        assert part in line
    assert model.load().tok_s_prefill == pytest.approx(3 * 1000 / TIMING.prefill_ms)


async def test_cached_tokens_are_reported_and_not_counted_as_prefill(caplog: pytest.LogCaptureFixture) -> None:
    model = scripted_model(answer("hello", cached=2))
    events = await events_of(model, [1, 2, 3])
    assert isinstance(events[-1], Finished)
    assert (events[-1].prompt_tokens, events[-1].cached_tokens) == (3, 2)
    assert "prompt_tokens=3 completion_tokens=6 cached_tokens=2" in completions(caplog)[0]
    assert model.load().tok_s_prefill == pytest.approx(1 * 1000 / TIMING.prefill_ms, abs=0.01)


async def test_cached_tokens_are_reported_for_an_answer_that_a_stop_string_ended() -> None:
    events = await events_of(scripted_model(answer("hello", cached=2)), [1, 2, 3], stop=["ll"])
    assert isinstance(events[-1], Finished)
    assert events[-1].cached_tokens == 2


async def test_principal_is_sent_to_the_engine_as_the_prefix_cache_salt() -> None:
    model = scripted_model(answer("x"))
    async with aclosing(run(model, [[1]], request(), principal="s")) as events:
        assert isinstance([event async for event in events][-1], Finished)
    assert [sent.salt for sent in model.engine.requests] == ["s"]  # type: ignore[attr-defined]


async def test_token_outside_the_model_vocabulary_is_rejected() -> None:
    model = scripted_model(answer("hello"))
    model.engine.ready = msgspec.structs.replace(model.engine.ready, vocab_size=END)
    with pytest.raises(ApiError, match=r"<\|im_end\|>") as refused:
        await events_of(model, [1, END])
    assert refused.value.status == 400


async def test_text_held_back_as_a_possible_stop_string_is_released_at_the_output_limit() -> None:
    events = await events_of(scripted_model(answer("to be cont", finish="length")), [1], stop=["continued"])
    assert text_of(events) == "to be cont"
    assert isinstance(events[-1], Finished) and events[-1].reason == "length"


async def test_incomplete_utf8_character_at_the_end_of_the_answer_becomes_a_replacement_character() -> None:
    async def script(message: Generate, say: object) -> None:
        say(tokens=TOKENIZER.encode("🦊")[:2], finish="length", timing=TIMING)  # type: ignore[operator]

    assert text_of(await events_of(scripted_model(script), [1])) == "\ufffd"


async def test_stop_string_cancels_the_request_in_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    model = scripted_model(endless("one two three"))
    events = await events_of(model, [1], stop=["never", " thr"])
    assert text_of(events) == "one two"
    assert isinstance(events[-1], Finished) and events[-1].reason == "stop"
    assert model.engine.cancelled.is_set()  # type: ignore[attr-defined]
    assert len(completions(caplog)) == 1


async def test_stop_string_cancels_the_engine_request_before_the_last_text_is_read() -> None:
    model = scripted_model(endless("one two three"))
    async with aclosing(run(model, [[1]], request(stop=["three"]))) as events:
        assert isinstance(await anext(events), Started)
        assert await anext(events) == TextDelta("one two ")
        assert model.engine.cancelled.is_set()  # type: ignore[attr-defined]


async def test_stop_string_at_the_very_end_of_the_answer_is_removed() -> None:
    events = await events_of(scripted_model(answer("the end")), [1], stop=["end"])
    assert text_of(events) == "the "
    assert isinstance(events[-1], Finished) and events[-1].reason == "stop"


async def test_closing_an_inference_run_cancels_the_engine_request_and_logs_one_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = scripted_model(endless("hello"))
    async with aclosing(run(model, [[1]], request())) as events:
        await anext(events)
        await anext(events)
    assert model.engine.cancelled.is_set()  # type: ignore[attr-defined]
    (line,) = completions(caplog)
    assert "finish_reason=cancelled" in line and "client_gone=True" in line and "completion_tokens=5" in line


class Clock:
    """A replacement for the module `time`."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("leaves", "figures"),
    [
        (False, "finish_reason=stop queue_ms=100000 ttft_ms=100000 prefill_ms=0"),
        (True, "finish_reason=cancelled queue_ms=100000 ttft_ms=None prefill_ms=0"),
    ],
    ids=["stopped", "disconnected"],
)
async def test_logged_prefill_time_excludes_the_wait_for_admission(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, leaves: bool, figures: str
) -> None:
    clock = Clock()
    monkeypatch.setattr("helexa.neuron.requests.request_and_run_records.time", clock)
    one_seat = TorchConfig(admission=AdmissionConfig(max_in_flight=1))
    other = scripted_model(endless("one two three"))
    model = ServedModel(other.id, other.spec, other.text, other.engine, one_seat)
    async with model.admission.admit("a", 1, 1):
        running = asyncio.create_task(events_of(model, [1] * 9, stop=["two"]))
        await until(lambda: model.load().queue_depth == 1)
        clock.now = 100.0
        if leaves:
            running.cancel()
            await asyncio.wait([running])
    await asyncio.wait([running])
    (line,) = completions(caplog)
    assert figures in line
    assert model.load().tok_s_prefill == 0


async def test_prefill_rate_uses_only_times_measured_by_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("helexa.neuron.requests.request_and_run_records.time", clock)

    async def script(message: Generate, say: Say) -> None:
        clock.now = 100.0  # as if the request had waited
        say(tokens=TOKENIZER.encode("the end"))

    model = scripted_model(script)
    events = await events_of(model, [1] * 9, stop=["end"])
    assert isinstance(events[-1], Finished)
    assert events[-1].prefill_ms == 100_000
    assert model.load().tok_s_prefill == 0


async def test_engine_error_after_the_first_tokens_becomes_a_failed_event(caplog: pytest.LogCaptureFixture) -> None:
    *events, last = await events_of(scripted_model(failing("hel", "the model was unloaded")), [1])
    assert text_of(events) == "hel"
    assert isinstance(last, Failed) and (last.error.status, str(last.error)) == (500, "the model was unloaded")
    (line,) = completions(caplog)
    assert "finish_reason=error" in line and "client_gone=False" in line


async def test_unexpected_exception_in_the_stream_reveals_no_details_to_the_client(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class BrokenStream:
        unread = 0

        def __init__(self) -> None:
            self.outputs = [TokenOutput(id=1, tokens=TOKENIZER.encode("hel"))]

        async def __anext__(self) -> TokenOutput:
            if self.outputs:
                return self.outputs.pop()
            raise ValueError("an inner detail")

        async def aclose(self) -> None:
            pass

    model = scripted_model(answer("unused"))
    model.engine.generate = lambda *_, **__: BrokenStream()  # type: ignore[method-assign,assignment]
    *events, last = await events_of(model, [1])
    assert text_of(events) == "hel"
    assert isinstance(last, Failed) and last.error.status == 500 and "inner detail" not in str(last.error)
    assert "finish_reason=error" in completions(caplog)[0]


async def test_retryable_error_of_the_engine_becomes_503_with_retry_after() -> None:
    async def script(message: Generate, say: Say) -> None:
        say(finish="error", error="the model's engine ended", retry=True)

    *_, last = await events_of(scripted_model(script), [1])
    assert isinstance(last, Failed)
    assert (last.error.status, last.error.code, last.error.retry_after) == (503, "service_unavailable", 2)


async def test_started_event_is_sent_before_the_prefill_ends() -> None:
    model = scripted_model(endless(""))
    async with aclosing(run(model, [[1]], request())) as events:
        assert await anext(events) == Started(1)
        assert len(model.engine.requests) == 1  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("prompt_tokens", "requested", "limit"),
    [(10, None, CONTEXT - 10), (10, 5, 5), (10, 10**9, CONTEXT - 10), (CONTEXT - 1, 100, 1)],
)
def test_output_limit_is_lowered_so_that_prompt_and_answer_fit_the_context(
    prompt_tokens: int, requested: int | None, limit: int
) -> None:
    assert output_limit([1] * prompt_tokens, requested, CONTEXT) == limit


def test_answer_without_max_tokens_may_fill_the_context() -> None:
    assert output_limit([1], None, 1_000_000) == 999_999


def test_default_output_limit_applies_only_if_the_request_has_none() -> None:
    assert output_limit([1], None, 1_000_000, default=8192) == 8192
    assert output_limit([1], 100_000, 1_000_000, default=8192) == 100_000
    assert output_limit([1] * 90, None, 100, default=8192) == 10


@pytest.mark.parametrize("prompt_tokens", [CONTEXT, CONTEXT + 1])
async def test_prompt_that_leaves_no_space_for_an_answer_is_rejected(prompt_tokens: int) -> None:
    model = scripted_model(answer("x"))
    with pytest.raises(ApiError, match=f"maximum context length is {CONTEXT} tokens") as refused:
        await events_of(model, [1] * prompt_tokens)
    assert (refused.value.status, refused.value.code) == (400, "context_length_exceeded")
    assert refused.value.extras == {"prompt_len": prompt_tokens, "max": CONTEXT}
    assert model.engine.requests == []  # type: ignore[attr-defined]


async def test_empty_prompt_is_rejected() -> None:
    with pytest.raises(ApiError, match="no tokens") as refused:
        await events_of(scripted_model(answer("x")), [])
    assert refused.value.status == 400


async def test_logit_bias_of_an_unknown_token_is_rejected() -> None:
    with pytest.raises(ApiError, match=r"logit_bias\.9999") as refused:
        await events_of(scripted_model(answer("x")), [1], logit_bias={9999: 1.0})
    assert (refused.value.status, refused.value.param) == (400, "logit_bias")


@pytest.mark.parametrize(("ignore", "stop_ids"), [(None, [END]), (True, [])])
async def test_ignore_eos_sends_no_stop_tokens_to_the_engine(ignore: bool | None, stop_ids: list[int]) -> None:
    model = scripted_model(answer("x"))
    await events_of(model, [1], ignore_eos=ignore)
    (sent,) = model.engine.requests  # type: ignore[attr-defined]
    assert sent.stop_ids == stop_ids


@pytest.mark.parametrize(
    ("fields", "defaults", "expected"),
    [
        ({}, {}, {"temperature": 0.7, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}),
        ({}, {"temperature": 0.6, "top_p": 0.95, "top_k": 20}, {"temperature": 0.6, "top_p": 0.95, "top_k": 20}),
        ({"temperature": 1.5, "top_k": -1}, {"temperature": 0.6, "top_k": 20}, {"temperature": 1.5, "top_k": 0}),
        ({"temperature": 0}, {"temperature": 0.6}, {"temperature": 0.0}),
        ({"temperature": 1e-30}, {}, {"temperature": 0.0}),
        ({}, {"temperature": -1, "top_k": -1, "top_p": 7, "repetition_penalty": 0}, {"temperature": 0, "top_k": 0}),
        ({"seed": 5}, {}, {"seed": 5}),
        ({"seed": -(10**30)}, {}, {}),
        ({"frequency_penalty": -2, "presence_penalty": 2}, {}, {"frequency_penalty": -2, "presence_penalty": 2}),
    ],
)
def test_sampling_options_come_from_the_request_then_the_model_then_the_defaults(
    fields: dict[str, object], defaults: dict[str, float], expected: dict[str, float]
) -> None:
    params = sampling_params(request(**fields), defaults)
    assert {name: getattr(params, name) for name in expected} == expected
    assert 0 <= params.seed < 2**63 and 0 < params.top_p <= 1 and params.repetition_penalty > 0


@pytest.mark.parametrize("fields", [{}, {"seed": -1}])
def test_seed_is_random_if_it_is_missing_or_minus_one(fields: dict[str, object]) -> None:
    assert len({sampling_params(request(**fields), {}).seed for _ in range(10)}) == 10
