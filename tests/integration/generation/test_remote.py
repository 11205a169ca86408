"""Servers as targets: the routes of a real node, error responses, broken connections and invalid responses."""

import pytest

import helexa
from helexa.generation.target_choice import ModelLocation
from neuron.scripted_engine import MODEL, answer, endless, failing
from neuron.scripted_node import serve
from ports import free_port


async def test_completion_of_a_node_has_text_usage_and_timings():
    async with serve(answer("Good day.", cached=3)) as node:
        result = await helexa.agenerate("hi", target=node.url, model=MODEL, temperature=0.5, seed=11, max_tokens=40)
        assert isinstance(result, helexa.Completion)
        assert (result.text, result.finish_reason, result.seed, result.model) == ("Good day.", "stop", 11, MODEL)
        assert result.usage.cached == 3
        assert result.usage.completion == 10
        assert (result.timings.prefill_s, result.timings.decode_s) == (pytest.approx(0.0, abs=0.02), 0.034)
        sampling = node.engine.requests[-1].sampling
        assert (sampling.temperature, sampling.seed, node.engine.requests[-1].max_tokens) == (0.5, 11, 40)


async def test_requests_to_a_server_support_callbacks_and_batches():
    async with serve(answer("Good day.")) as node:
        pieces = []
        await helexa.agenerate("hi", target=f"{node.url}/v1/", model=MODEL, on_token=pieces.append)
        assert "".join(pieces) == "Good day."
        results = await helexa.abatch(["a", "b", "c"], target=node.url, model=MODEL)
        assert [result.text for result in results] == ["Good day."] * 3


async def test_request_without_options_uses_the_defaults_of_the_node_without_penalties():
    """Without options there are no penalties and no truncation; temperature and length are the node's defaults."""
    async with serve(answer("ok")) as node:
        await helexa.agenerate("hi", target=node.url, model=MODEL)
        plain = node.engine.requests[-1]
        sampling = plain.sampling
        assert (sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty) == (1, 0, 0)
        assert (sampling.top_p, sampling.top_k, sampling.min_p, sampling.logit_bias) == (1, 0, 0, {})
        _, direct = await node.post(
            "/v1/chat/completions", {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
        )
        assert direct["choices"][0]["message"]["content"] == "ok"
        assert node.engine.requests[-1].sampling.temperature == sampling.temperature
        assert node.engine.requests[-1].max_tokens == plain.max_tokens


async def test_leaving_the_context_of_a_stream_cancels_the_request_on_the_node():
    async with serve(endless("Well")) as node:
        async with helexa.astream("hi", target=node.url, model=MODEL) as stream:
            async for _ in stream:
                break
        await node.engine.cancelled.wait()


async def test_failure_of_the_server_during_an_answer_raises_engine_error():
    async with serve(failing("Well", "it broke")) as node:
        with pytest.raises(helexa.EngineError, match="it broke"):
            await helexa.agenerate("hi", target=node.url, model=MODEL)


async def test_node_error_responses_are_raised_as_the_matching_library_errors():
    async with serve(answer("ok")) as node:
        with pytest.raises(helexa.ModelNotFoundError, match="other"):
            await helexa.agenerate("hi", target=node.url, model="other")
        with pytest.raises(helexa.ContextLengthError):
            await helexa.agenerate("word " * 3000, target=node.url, model=MODEL)
        with pytest.raises(helexa.InvalidRequestError, match="temperature"):
            await helexa.agenerate("hi", target=node.url, model=MODEL, temperature=7)


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (400, "invalid_grammar", helexa.InvalidRequestError),
        (401, "invalid_api_key", helexa.AuthenticationError),
        (403, "model_not_allowed", helexa.PermissionDeniedError),
        (404, "unknown_path", helexa.NotFoundError),
        (404, "model_not_found", helexa.ModelNotFoundError),
        (408, "request_timeout", helexa.EngineError),
        (413, "request_too_large", helexa.InvalidRequestError),
        (429, "insufficient_quota", helexa.RateLimitError),
        (500, None, helexa.EngineError),
        (502, "bad_gateway", helexa.EngineError),
        (503, "shutting_down", helexa.OverloadedError),
        (529, "overloaded_error", helexa.OverloadedError),
    ],
)
def test_status_and_code_of_an_error_response_select_the_library_error_class(gateway, status, code, kind):
    gateway.error_response = (status, {}, {"error": {"message": "it failed", "code": code}})
    with pytest.raises(helexa.GenerationError) as raised:
        helexa.generate("hi", target=gateway.url, model="m")
    assert type(raised.value) is kind
    assert (raised.value.status, raised.value.code) == (status, code)


@pytest.mark.parametrize(
    ("key", "message"),
    [(None, "needs an API key; set the environment variable HELEXA_API_KEY"), ("sk-1", "it expired; check the env")],
)
def test_error_of_a_missing_or_rejected_api_key_names_the_environment_variable(gateway, monkeypatch, key, message):
    if key is not None:
        monkeypatch.setenv("HELEXA_API_KEY", key)
    gateway.error_response = (401, {}, {"error": {"message": "it expired", "code": "invalid_api_key"}})
    with pytest.raises(helexa.AuthenticationError, match=message):
        helexa.generate("hi", target=gateway.url, model="m")


@pytest.mark.parametrize(
    ("model", "hint"),
    [
        ("warm/modle", "did you mean 'warm/model'\\?"),
        ("x", "the server has cold/model, warm/model"),
        ("llama3.2:1b", "the server has cold/model, warm/model"),
    ],
)
def test_unknown_model_error_lists_or_suggests_models_of_the_server(gateway, model, hint):
    gateway.error_response = (404, {}, {"error": {"message": "no such model", "code": "model_not_found"}})
    with pytest.raises(helexa.ModelNotFoundError, match=f"no such model; {hint}") as raised:
        helexa.generate("hi", target=gateway.url, model=model)
    assert (raised.value.code, raised.value.status) == ("model_not_found", 404)


@pytest.mark.parametrize("listed", ["llama3.2:1b", "bartowski/Llama-3.2-1B-Instruct-GGUF:Q4_K_M"])
def test_short_model_name_selects_the_listed_model_with_the_full_name(gateway, listed):
    gateway.models = [{"id": listed, "loaded": True}]
    assert helexa.generate("hi", target=gateway.url, model="llama3.2:1b").model == listed


def test_default_model_is_the_first_loaded_model(gateway):
    result = helexa.generate("hi", target=gateway.url)
    assert (result.model, result.text) == ("warm/model", "Hello there!")
    assert gateway.requests[0]["model"] == "warm/model"


def test_environment_variables_select_server_api_key_and_model(gateway, monkeypatch):
    monkeypatch.setenv("HELEXA_BASE_URL", gateway.url)
    monkeypatch.setenv("HELEXA_API_KEY", "sk-1")
    monkeypatch.setenv("HELEXA_MODEL", "cold/model")
    assert helexa.generate("hi").model == "cold/model"
    assert gateway.authorization == "Bearer sk-1"


def test_busy_server_is_retried_four_times_after_its_retry_after(gateway, monkeypatch):
    busy = {"error": {"message": "busy", "type": "rate_limit_error", "code": "rate_limit_exceeded", "param": None}}
    gateway.error_response = (429, {"Retry-After": "0"}, busy)
    with pytest.raises(helexa.RateLimitError, match="busy") as raised:
        helexa.generate("hi", target=gateway.url, model="m")
    assert raised.value.retryable
    assert len(gateway.requests) == 5


@pytest.mark.parametrize(
    ("pieces", "kind", "message"),
    [
        (["one", "DROP"], helexa.UnreachableError, "broke"),
        ([{"error": {"message": "out of\nmemory", "code": None}}], helexa.EngineError, "out of memory"),
        ([{"choices": "none"}, {"usage": []}, {"choices": [7]}, "fine"], None, "fine"),
    ],
)
def test_broken_stream_raises_an_error_and_invalid_chunks_are_skipped(gateway, pieces, kind, message):
    gateway.chunks = pieces
    if kind is None:
        assert helexa.generate("hi", target=gateway.url, model="m").text == message
    else:
        with pytest.raises(kind, match=message):
            helexa.generate("hi", target=gateway.url, model="m")


def test_leaving_the_context_of_a_stream_closes_the_connection_to_the_server(gateway):
    gateway.chunks = ["one", "WAIT"]
    with helexa.stream("hi", target=gateway.url, model="m") as stream:
        assert next(iter(stream)).text == "one"
    assert gateway.client_disconnected.wait(60)


def test_refused_connection_raises_unreachable_error():
    with pytest.raises(helexa.UnreachableError, match="helexa up"):
        helexa.generate("hi", target=f"http://127.0.0.1:{free_port()}", model="m")


def test_batch_fails_at_once_if_server_is_unreachable():
    with pytest.raises(helexa.UnreachableError, match="no server"):
        helexa.batch(["a", "b"], target=f"http://127.0.0.1:{free_port()}", model="m", on_error="return")


def test_each_prompt_of_a_batch_to_a_lost_server_gets_a_retryable_error(gateway):
    model = helexa.load("m", target=gateway.url)
    gateway.chunks = ["DROP"]
    with pytest.raises(helexa.UnreachableError, match="broke"):
        model.generate("hi")
    gateway.close()
    results = model.batch(["a", "b"], on_error="return")
    assert [type(result) for result in results] == [helexa.UnreachableError] * 2
    assert results[0].retryable


@pytest.mark.parametrize("url", ["127.0.0.1:31313", "ftp://host", "http://", "http://host:port", "http://a b"])
def test_invalid_url_is_rejected(url):
    with pytest.raises(helexa.InvalidRequestError, match="not a URL"):
        helexa.generate("hi", target=url)


def test_option_dtype_is_rejected_for_a_request_to_a_server(gateway):
    with pytest.raises(helexa.InvalidRequestError, match="cannot be set for the server"):
        helexa.generate("hi", target=gateway.url, model="m", dtype="float32")


async def test_running_local_server_that_has_the_model_is_preferred_to_a_private_engine(monkeypatch):
    async with serve(answer("from the node")) as node:
        monkeypatch.setattr("helexa.generation.target_choice.LOCAL_URLS", (node.url,))
        assert ModelLocation(model=MODEL).url is None
        result = await helexa.agenerate("hi", model=MODEL)
        assert result.text == "from the node"


async def test_failed_prompt_of_a_concurrent_batch_gets_its_own_error():
    async with serve(answer("ok")) as node:
        results = await helexa.abatch(
            ["hi", "word " * 3000, "ho"], target=node.url, model=MODEL, on_error="return", max_parallel=3
        )
        assert [type(result) for result in results] == [
            helexa.Completion,
            helexa.ContextLengthError,
            helexa.Completion,
        ]
