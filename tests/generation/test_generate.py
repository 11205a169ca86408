"""One prompt, answered by a real model: what is said of the answer, how it is sampled, and how it is ended."""

import asyncio
import inspect
import threading

import psutil
import pytest
from pydantic import BaseModel

import helexa
from helexa.generation.background import background

COUNT = "Count from one to twenty in words."


async def in_flight(model):
    """How many requests the engine still has, as soon as it has had the time to drop what was ended."""
    target = await background().targets.find(model._place)
    engine = target._served().engine
    while engine.open_streams:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    return engine.open_streams


def nothing_runs(model):
    return background().submit(in_flight(model)).result(20) == 0


def test_a_completion_says_all_about_itself(small):
    answer = small.generate("What is the capital of France?", temperature=0, max_tokens=30)
    assert "Paris" in str(answer) == answer.text
    assert answer.finish_reason == "stop"
    assert answer.usage.prompt > 10
    assert 3 < answer.usage.completion < 30
    assert (answer.device, answer.dtype) == ("cpu", answer.dtype)
    assert answer.dtype in ("bfloat16", "float32")
    assert answer.timings.load_s < answer.timings.ttft_s <= answer.timings.total_s
    assert answer.tok_s > 0
    assert answer.choices == (answer,)


def test_answers_side_by_side_are_different_ones(small):
    """Not the same seed for all of them."""
    answer = small.generate("Tell me a story.", n=4, temperature=1.0, max_tokens=12, seed=7)
    assert [choice.seed for choice in answer.choices] == [7, 8, 9, 10]
    assert len({choice.text for choice in answer.choices}) >= 2
    again = small.generate("Tell me a story.", temperature=1.0, max_tokens=12, seed=9)
    assert again.text == answer.choices[2].text


def test_without_a_seed_each_answer_has_one_of_its_own_and_tells_it(small):
    answers = small.generate("Tell me a story.", n=3, temperature=1.0, max_tokens=8).choices
    assert len({answer.seed for answer in answers}) == 3


def test_at_temperature_0_all_answers_are_equal(small):
    answer = small.generate("Name a fruit.", n=3, temperature=0, max_tokens=8)
    assert len({choice.text for choice in answer.choices}) == 1


def engines():
    running = [process for process in psutil.Process().children() if process.status() != psutil.STATUS_ZOMBIE]
    return {process.pid for process in running if "helexa.neuron.engine.process" in process.cmdline()}


def test_one_engine_and_one_copy_of_the_weights_however_many_ask(small):
    """Not one copy for each that runs in parallel."""
    path = small._place.model
    before = engines()
    small.batch([f"Say {word}." for word in "abcdefgh"], max_parallel=8, max_tokens=2)
    helexa.generate("hi", model=path, target="private", max_tokens=1)
    with helexa.load(path, target="private") as other:
        other.generate("hi", max_tokens=1)
    assert engines() == before != set()


def test_pieces_come_one_by_one_and_make_up_the_answer(small):
    pieces = []
    with small.stream(COUNT, temperature=0, max_tokens=10) as stream:
        pieces += [piece.text for piece in stream]
    assert len(pieces) > 5
    assert "".join(pieces) == stream.completion.text


def test_a_callback_hears_each_piece_in_the_thread_that_asked(small):
    heard = []
    answer = small.generate(
        COUNT, temperature=0, max_tokens=8, on_token=lambda text: heard.append((text, threading.current_thread()))
    )
    assert "".join(text for text, _ in heard) == answer.text
    assert {thread for _, thread in heard} == {threading.main_thread()}


async def test_a_callback_may_be_a_coroutine(small):
    heard = []

    async def on_token(text):
        await asyncio.sleep(0)
        heard.append((text, asyncio.get_running_loop()))

    answer = await small.agenerate(COUNT, temperature=0, max_tokens=8, on_token=on_token)
    assert "".join(text for text, _ in heard) == answer.text
    assert {loop for _, loop in heard} == {asyncio.get_running_loop()}
    heard.clear()
    again = await asyncio.to_thread(small.generate, COUNT, temperature=0, max_tokens=8, on_token=on_token)
    assert "".join(text for text, _ in heard) == again.text


def test_what_a_callback_raises_ends_the_answer_and_comes_out(small):
    heard = []

    def on_token(text):
        heard.append(text)
        if len(heard) == 3:
            raise LookupError("enough")

    with pytest.raises(LookupError, match="enough"):
        small.generate(COUNT, max_tokens=2000, on_token=on_token)
    assert len(heard) == 3
    assert nothing_runs(small)


def test_pieces_of_several_answers_are_not_mixed(small):
    with pytest.raises(helexa.InvalidRequestError, match="run into one another"):
        small.generate("hi", n=2, on_token=print)


def test_a_stream_that_is_left_is_ended_in_the_engine(small):
    with small.stream(COUNT, max_tokens=2000) as stream:
        next(iter(stream))
    assert nothing_runs(small)
    assert stream.completion is None


async def test_a_cancelled_coroutine_is_ended_in_the_engine(small):
    started = asyncio.Event()
    asking = asyncio.create_task(small.agenerate(COUNT, max_tokens=2000, on_token=lambda text: started.set()))
    await started.wait()
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert await asyncio.to_thread(nothing_runs, small)


async def test_coroutines_and_plain_functions_share_an_engine_whatever_loop_runs(small):
    plain = small.generate("Name a fruit.", temperature=0, max_tokens=5)  # inside of a running loop
    both = await asyncio.gather(*(small.agenerate("Name a fruit.", temperature=0, max_tokens=5) for _ in range(2)))
    async with small.astream("Name a fruit.", temperature=0, max_tokens=5) as stream:
        text = "".join([piece.text async for piece in stream])
    assert {plain.text, *(answer.text for answer in both), text, stream.completion.text} == {plain.text}


def test_an_answer_is_held_to_a_schema(small):
    schema = {
        "type": "object",
        "properties": {"colour": {"enum": ["red", "blue"]}},
        "required": ["colour"],
        "additionalProperties": False,
    }
    answer = small.generate("Name a colour.", schema=schema, temperature=0, max_tokens=40)
    assert answer.parsed["colour"] in ("red", "blue")


class Person(BaseModel):
    name: str
    age: int


def test_an_answer_becomes_a_pydantic_model(small):
    answer = small.generate("Ann is 31 years old. Who is it?", schema=Person, temperature=0, max_tokens=60)
    assert isinstance(answer.parsed, Person)
    assert answer.parsed.age >= 0


def test_an_answer_that_is_cut_is_no_value(small):
    with pytest.raises(helexa.SchemaError, match="raise max_tokens") as raised:
        small.generate("Ann is 31 years old. Who is it?", schema=Person, temperature=0, max_tokens=3)
    assert raised.value.completion.finish_reason == "length"


def test_a_prompt_too_long_for_the_model_is_an_error_of_its_own_kind(small):
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
def test_what_cannot_be_asked_is_refused_in_words(small, prompt, options, message):
    with pytest.raises(helexa.InvalidRequestError, match=message):
        small.generate(prompt, **options)


def test_misspelled_option_is_a_type_error_that_names_the_right_one(small):
    with pytest.raises(TypeError, match=r"^there is no option 'temperatur'; did you mean 'temperature'\?$"):
        small.generate("hi", temperatur=1)
    with pytest.raises(TypeError, match=r"^there is no option 'colour'; there are: frequency_penalty, "):
        helexa.generate("hi", colour="red", target="http://127.0.0.1:1")


def test_the_package_is_light_until_it_is_used():
    assert set(helexa.__all__) <= set(dir(helexa))
    assert all(getattr(helexa, name) is not None for name in helexa.__all__)
    assert inspect.iscoroutinefunction(helexa.agenerate)
