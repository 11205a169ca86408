"""Many prompts: their order, how many run at once, and what becomes of those that fail."""

import asyncio
import threading

import pytest

import helexa


def texts(results):
    return [getattr(result, "text", None) for result in results]


def test_results_are_in_the_order_of_the_prompts_whatever_order_they_come_in(scripted):
    _, model = scripted
    came = []
    prompts = ["late one", "two", "three", "four"]
    results = model.batch(prompts, on_result=lambda index, result: came.append(index))
    assert texts(results) == prompts
    assert came[-1] == 0
    assert sorted(came) == [0, 1, 2, 3]


@pytest.mark.parametrize(("asked", "most"), [(None, 4), (1, 1), (7, 7)])
def test_no_more_run_at_once_than_are_to(scripted, asked, most):
    target, model = scripted
    model.batch([f"p{number} x y z" for number in range(20)], max_parallel=asked)
    assert target.most == most


def test_a_failed_prompt_costs_only_itself(scripted):
    """It is an error of its kind in its place, not an empty text."""
    _, model = scripted
    told = {}
    results = model.batch(["a", "bad one", "c", ""], on_error="return", on_result=told.__setitem__)
    assert texts(results) == ["a", None, "c", None]
    assert [type(results[index]) for index in (1, 3)] == [helexa.InvalidRequestError] * 2
    assert (results[1].index, str(results[1])) == (1, "it is bad")
    assert told == dict(enumerate(results))


def test_unless_it_is_asked_for_a_failure_is_raised_and_ends_the_batch(scripted):
    target, model = scripted
    with pytest.raises(helexa.BatchError, match="prompt 1: it is bad") as raised:
        model.batch(["a", "bad", *["wait"] * 20], max_parallel=1)
    assert raised.value.index == 1
    assert isinstance(raised.value.__cause__, helexa.InvalidRequestError)
    assert raised.value.results[0].text == "a"
    assert raised.value.results[-1] is None
    assert target.running == 0
    assert len(target.requests) <= 3


def test_what_brings_the_engine_down_costs_only_itself(scripted):
    target, model = scripted
    prompts = [f"p{number} a b c" for number in range(12)]
    prompts[5] = "crash a b c"
    results = model.batch(prompts, on_error="return")
    assert [index for index, result in enumerate(results) if not isinstance(result, helexa.Completion)] == [5]
    assert isinstance(results[5], helexa.EngineError)
    assert target.crashes == 2  # beside others, then alone


def test_each_prompt_has_a_seed_of_its_own(scripted):
    target, model = scripted
    results = model.batch(["a", "b", "c"], seed=5)
    assert [result.seed for result in results] == [5, 6, 7]
    assert sorted(request.body("m")["seed"] for request in target.requests) == [5, 6, 7]


def test_what_a_callback_raises_ends_the_batch_and_comes_out(scripted):
    target, model = scripted

    def on_result(index, result):
        raise LookupError(threading.current_thread().name)

    with pytest.raises(LookupError, match="MainThread"):
        model.batch(["a", *["wait"] * 10], on_result=on_result)
    assert target.running == 0


async def test_the_callback_of_a_coroutine_may_be_one(scripted):
    _, model = scripted
    told = {}

    async def on_result(index, result):
        await asyncio.sleep(0)
        told[index] = (result.text, asyncio.get_running_loop())

    await model.abatch(["a", "b"], on_result=on_result)
    assert told == {0: ("a", asyncio.get_running_loop()), 1: ("b", asyncio.get_running_loop())}


async def test_a_cancelled_batch_ends_all_that_runs(scripted):
    target, model = scripted
    running = asyncio.create_task(model.abatch(["wait"] * 10, max_parallel=3))
    await asyncio.to_thread(target.asked.wait)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert (target.running, target.cancelled > 0) == (0, True)


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ("one prompt", {}, "see generate"),
        (["a"], {"max_parallel": 0}, "max_parallel is 0"),
        (["a"], {"on_error": "ignore"}, "'ignore'"),
    ],
)
def test_what_is_no_batch_is_refused(scripted, prompts, options, message):
    with pytest.raises(helexa.InvalidRequestError, match=message):
        scripted[1].batch(prompts, **options)


def test_no_prompts_have_no_results(scripted):
    assert scripted[1].batch([]) == []


def test_several_answers_wait_for_the_first_to_have_read_the_prompt(scripted):
    target, model = scripted
    begun = []
    target.before = lambda prompt: begun.append(target.asked.is_set())
    assert len(model.generate("a b", n=3).choices) == 3
    assert begun == [False, True, True]


def test_a_callback_that_calls_back_is_told_instead_of_hanging(scripted):
    _, model = scripted

    async def on_token(text):
        model.generate("b")

    with pytest.raises(RuntimeError, match="may not call back"):
        model.generate("a", on_token=on_token)
