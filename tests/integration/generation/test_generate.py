"""One prompt with a real model: completion fields, sampling, streaming, schemas and cancellation."""

import asyncio
import inspect
import threading

import psutil
import pytest
from pydantic import BaseModel

import helexa
from helexa.generation.background_event_loop import background
from helexa.generation.request import _closed

COUNT = "Count from one to twenty in words."


async def in_flight(model):
    """Wait until the engine has no open streams, and return their number."""
    target = await background().targets.find(model._location)
    engine = target._served().engine
    while engine.open_streams:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    return engine.open_streams


def nothing_runs(model):
    return background().submit(in_flight(model)).result(20) == 0


def test_completion_reports_usage_and_timings(small):
    completion = small.generate("What is the capital of France?", temperature=0, max_tokens=30)
    assert "Paris" in str(completion) == completion.text
    assert completion.finish_reason == "stop"
    assert completion.usage.prompt > 10
    assert 3 < completion.usage.completion < 30
    assert (completion.device, completion.dtype) == ("cpu", completion.dtype)
    assert completion.dtype in ("bfloat16", "float32")
    assert completion.timings.load_s < completion.timings.ttft_s <= completion.timings.total_s
    assert completion.tok_s > 0
    assert completion.choices == (completion,)


def test_each_of_several_answers_reports_a_seed_that_reproduces_the_answer(small):
    """The seeds count up from that of the request. A request with the third seed returns the third text."""
    completion = small.generate("Tell me a story.", n=4, temperature=1.0, max_tokens=12, seed=7)
    assert [choice.seed for choice in completion.choices] == [7, 8, 9, 10]
    assert len({choice.text for choice in completion.choices}) >= 2
    repeated = small.generate("Tell me a story.", temperature=1.0, max_tokens=12, seed=9)
    assert repeated.text == completion.choices[2].text


def test_answers_without_seed_report_different_seeds(small):
    answers = small.generate("Tell me a story.", n=3, temperature=1.0, max_tokens=8).choices
    assert len({completion.seed for completion in answers}) == 3


def test_at_temperature_0_all_answers_are_equal(small):
    completion = small.generate("Name a fruit.", n=3, temperature=0, max_tokens=8)
    assert len({choice.text for choice in completion.choices}) == 1


def engines():
    running = [process for process in psutil.Process().children() if process.status() != psutil.STATUS_ZOMBIE]
    return {process.pid for process in running if "helexa.neuron.engine.process" in process.cmdline()}


def test_parallel_requests_share_one_engine(small):
    """Parallel requests, `generate` and a second `load` of the same model start no further engine."""
    path = small._location.model
    pids_before = engines()
    small.batch([f"Say {word}." for word in "abcdefgh"], max_parallel=8, max_tokens=2)
    helexa.generate("hi", model=path, target="private", max_tokens=1)
    with helexa.load(path, target="private") as other_model:
        other_model.generate("hi", max_tokens=1)
    assert engines() == pids_before != set()


def test_streamed_pieces_joined_are_the_text_of_the_answer(small):
    pieces = []
    with small.stream(COUNT, temperature=0, max_tokens=100) as stream:
        pieces += [piece.text for piece in stream]
    assert len(pieces) > 1  # a slow reader gets several tokens in one piece
    assert "".join(pieces) == stream.completion.text


def test_on_token_callback_runs_in_the_calling_thread(small):
    pieces = []
    completion = small.generate(
        COUNT, temperature=0, max_tokens=8, on_token=lambda text: pieces.append((text, threading.current_thread()))
    )
    assert "".join(text for text, _ in pieces) == completion.text
    assert {thread for _, thread in pieces} == {threading.main_thread()}


async def test_on_token_may_be_an_async_function(small):
    pieces = []

    async def on_token(text):
        await asyncio.sleep(0)
        pieces.append((text, asyncio.get_running_loop()))

    completion = await small.agenerate(COUNT, temperature=0, max_tokens=8, on_token=on_token)
    assert "".join(text for text, _ in pieces) == completion.text
    assert {loop for _, loop in pieces} == {asyncio.get_running_loop()}
    pieces.clear()
    repeated = await asyncio.to_thread(small.generate, COUNT, temperature=0, max_tokens=8, on_token=on_token)
    assert "".join(text for text, _ in pieces) == repeated.text


def test_error_in_the_on_token_callback_ends_the_answer_and_is_raised(small):
    pieces = []

    def on_token(text):
        pieces.append(text)
        if len(pieces) == 3:
            raise LookupError("enough")

    with pytest.raises(LookupError, match="enough"):
        small.generate(COUNT, temperature=0, max_tokens=2000, on_token=on_token)
    assert len(pieces) == 3
    assert nothing_runs(small)


def test_on_token_with_n_greater_than_1_is_rejected(small):
    with pytest.raises(helexa.InvalidRequestError, match="requires n=1"):
        small.generate("hi", n=2, on_token=print)


def test_leaving_the_context_of_a_stream_cancels_the_request(small):
    with small.stream(COUNT, max_tokens=2000) as stream:
        next(iter(stream))
    assert nothing_runs(small)
    assert stream.completion is None


async def test_canceled_coroutine_cancels_the_request(small):
    started = asyncio.Event()
    task = asyncio.create_task(small.agenerate(COUNT, max_tokens=2000, on_token=lambda text: started.set()))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.to_thread(nothing_runs, small)


async def test_coroutines_and_plain_functions_share_an_engine(small):
    plain = small.generate("Name a fruit.", temperature=0, max_tokens=5)  # inside of a running loop
    both = await asyncio.gather(*(small.agenerate("Name a fruit.", temperature=0, max_tokens=5) for _ in range(2)))
    async with small.astream("Name a fruit.", temperature=0, max_tokens=5) as stream:
        text = "".join([piece.text async for piece in stream])
    assert {plain.text, *(completion.text for completion in both), text, stream.completion.text} == {plain.text}


def test_generated_answer_matches_the_requested_json_schema(small):
    schema = {
        "type": "object",
        "properties": {"color": {"enum": ["red", "blue"]}},
        "required": ["color"],
        "additionalProperties": False,
    }
    completion = small.generate("Name a color.", schema=schema, temperature=0, max_tokens=40)
    assert completion.parsed["color"] in ("red", "blue")


def test_schema_property_with_the_name_of_a_keyword_gets_no_additional_properties():
    inner = {"type": "object", "properties": {"properties": {"type": "object", "properties": {"a": {"type": "null"}}}}}
    closed = _closed({"$defs": {"properties": inner}, "default": {"properties": {"a": 1}}})
    named = closed["$defs"]["properties"]
    assert named["additionalProperties"] is False
    assert list(named["properties"]) == ["properties"]
    assert named["properties"]["properties"]["additionalProperties"] is False
    assert closed["default"] == {"properties": {"a": 1}}


class Person(BaseModel):
    name: str
    age: int


def test_answer_is_parsed_into_pydantic_model(small):
    completion = small.generate("Ann is 31 years old. Who is it?", schema=Person, temperature=0, max_tokens=60)
    assert isinstance(completion.parsed, Person)
    assert completion.parsed.age >= 0


def test_truncated_answer_to_a_request_with_a_schema_raises_schema_error(small):
    with pytest.raises(helexa.SchemaError, match="raise max_tokens") as raised:
        small.generate("Ann is 31 years old. Who is it?", schema=Person, temperature=0, max_tokens=3)
    assert raised.value.completion.finish_reason == "length"


def test_too_long_prompt_raises_context_length_error(small):
    with pytest.raises(helexa.ContextLengthError, match="maximum context length"):
        small.generate("word " * 9000)


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ("", {}, "empty"),
        ([], {}, "no messages"),
        (7, {}, "not int"),
        ([{"content": "hi"}], {}, "message 0"),
        ("hi", {"n": 0}, "n is 0"),
        ("hi", {"temperature": 9}, "temperature"),
        ("hi", {"schema": 7}, "schema"),
        ([{"role": "nobody", "content": "hi"}], {}, "role"),
    ],
)
def test_invalid_prompt_or_option_is_rejected(small, prompt, options, message):
    with pytest.raises(helexa.InvalidRequestError, match=message):
        small.generate(prompt, **options)


def test_misspelled_option_suggests_the_correct_name(small):
    with pytest.raises(TypeError, match=r"^there is no option 'temperatur'; did you mean 'temperature'\?$"):
        small.generate("hi", temperatur=1)
    with pytest.raises(TypeError, match=r"^there is no option 'color'; options are: frequency_penalty, "):
        helexa.generate("hi", color="red", target="http://127.0.0.1:1")


def test_all_public_names_of_the_package_helexa_are_importable():
    assert set(helexa.__all__) <= set(dir(helexa))
    assert all(getattr(helexa, name) is not None for name in helexa.__all__)
    assert inspect.iscoroutinefunction(helexa.agenerate)
