"""Batches: order of results, concurrency, failing prompts, callbacks and cancellation."""

import asyncio
import threading

import pytest

import helexa


def texts(results):
    return [getattr(result, "text", None) for result in results]


def test_results_of_a_batch_have_the_order_of_its_prompts(scripted):
    _, model = scripted
    order = []
    prompts = ["late one", "two", "three", "four"]
    results = model.batch(prompts, on_result=lambda index, result: order.append(index))
    assert texts(results) == prompts
    assert order[-1] == 0
    assert sorted(order) == [0, 1, 2, 3]


@pytest.mark.parametrize(("max_parallel", "max_running"), [(None, 4), (1, 1), (7, 7)])
def test_max_parallel_limits_the_concurrent_requests_of_a_batch(scripted, max_parallel, max_running):
    target, model = scripted
    model.batch([f"p{number} x y z" for number in range(20)], max_parallel=max_parallel)
    assert target.max_running == max_running


def test_batch_with_on_error_return_gives_the_error_as_the_failed_prompts_result(scripted):
    """With `on_error="return"`, the result of a failed prompt is its error."""
    _, model = scripted
    by_index = {}
    results = model.batch(["a", "bad one", "c", ""], on_error="return", on_result=by_index.__setitem__)
    assert texts(results) == ["a", None, "c", None]
    assert [type(results[index]) for index in (1, 3)] == [helexa.InvalidRequestError] * 2
    assert (results[1].index, str(results[1])) == (1, "bad prompt")
    assert by_index == dict(enumerate(results))


def test_failed_prompt_ends_the_batch_by_default_with_a_batch_error(scripted):
    target, model = scripted
    with pytest.raises(helexa.BatchError, match="prompt 1: bad prompt") as raised:
        model.batch(["a", "bad", *["wait"] * 20], max_parallel=1)
    assert raised.value.index == 1
    assert isinstance(raised.value.__cause__, helexa.InvalidRequestError)
    assert raised.value.results[0].text == "a"
    assert raised.value.results[-1] is None
    assert target.running == 0
    assert len(target.requests) <= 3


def test_batch_prompt_that_crashes_the_engine_fails_no_other_prompt(scripted):
    target, model = scripted
    prompts = [f"p{number} a b c" for number in range(12)]
    prompts[5] = "crash a b c"
    results = model.batch(prompts, on_error="return")
    assert [index for index, result in enumerate(results) if not isinstance(result, helexa.Completion)] == [5]
    assert isinstance(results[5], helexa.EngineError)
    assert target.crashes == 2  # once among other prompts, once alone


def test_prompt_number_i_of_a_batch_uses_seed_plus_i(scripted):
    target, model = scripted
    results = model.batch(["a", "b", "c"], seed=5)
    assert [result.seed for result in results] == [5, 6, 7]
    assert sorted(request.body("m")["seed"] for request in target.requests) == [5, 6, 7]


def test_seed_minus_one_gives_each_prompt_a_random_seed(scripted):
    _, model = scripted
    results = [*model.batch(["a", "b"], seed=-1), *model.batch(["a", "b"], seed=-1)]
    assert len({result.seed for result in results}) == 4
    assert all(result.seed >= 0 for result in results)


def test_seeds_counted_up_from_minus_2_skip_the_random_seed_minus_1(scripted):
    _, model = scripted
    first, again = (model.batch(["a", "b", "c"], seed=-2) for _ in range(2))
    assert [result.seed for result in first] == [result.seed for result in again] == [-2, 1 << 31, 0]


def test_error_in_the_on_result_callback_ends_the_batch_and_is_raised(scripted):
    target, model = scripted

    def on_result(index, result):
        raise LookupError(threading.current_thread().name)

    with pytest.raises(LookupError, match="MainThread"):
        model.batch(["a", *["wait"] * 10], on_result=on_result)
    assert target.running == 0


async def test_abatch_awaits_an_async_on_result_callback(scripted):
    _, model = scripted
    by_index = {}

    async def on_result(index, result):
        await asyncio.sleep(0)
        by_index[index] = (result.text, asyncio.get_running_loop())

    await model.abatch(["a", "b"], on_result=on_result)
    assert by_index == {0: ("a", asyncio.get_running_loop()), 1: ("b", asyncio.get_running_loop())}


async def test_canceled_batch_cancels_its_requests(scripted):
    target, model = scripted
    running = asyncio.create_task(model.abatch(["wait"] * 10, max_parallel=3))
    await asyncio.to_thread(target.started.wait)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert (target.running, target.canceled > 0) == (0, True)


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ("one prompt", {}, "use generate"),
        (["a"], {"max_parallel": 0}, "max_parallel is 0"),
        (["a"], {"on_error": "ignore"}, "'ignore'"),
    ],
)
def test_batch_call_with_invalid_arguments_raises_invalid_request_error(scripted, prompts, options, message):
    with pytest.raises(helexa.InvalidRequestError, match=message):
        scripted[1].batch(prompts, **options)


def test_empty_batch_returns_no_results(scripted):
    assert scripted[1].batch([]) == []


def test_second_and_third_answers_to_a_prompt_start_after_the_first_prefill(scripted):
    target, model = scripted
    begun = []
    target.on_request = lambda prompt: begun.append(target.started.is_set())
    assert len(model.generate("a b", n=3).choices) == 3
    assert begun == [False, True, True]


def test_callback_that_calls_helexa_synchronously_raises_runtime_error(scripted):
    _, model = scripted

    async def on_token(text):
        model.generate("b")

    with pytest.raises(RuntimeError, match="must not call helexa"):
        model.generate("a", on_token=on_token)
