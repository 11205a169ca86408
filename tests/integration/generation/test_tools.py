"""Tools, log-probabilities and embeddings, on a server and in a private engine."""

import math
from typing import Annotated, Literal

import pytest
from pydantic import Field

import helexa
from helexa.core.model_source_ids import ModelSource
from helexa.core.node_reports import ModelSpec
from helexa.generation.background_event_loop import background
from helexa.generation.private import PrivateTarget
from helexa.generation.target_choice import ModelLocation
from neuron.scripted_engine import AGENT_TEMPLATE, MODEL, Registry, answer, byte_tokenizer, scripted_model
from neuron.scripted_node import serve

TOKENIZER = byte_tokenizer("<tool_call>", "</tool_call>")
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo", "unit": "C"}}</tool_call>'
MALFORMED = {"id": "a", "index": 0, "function": {"name": "weather", "arguments": '{"city": "Os'}}


def weather(city: Annotated[str, Field(description="a town")], unit: Literal["C", "F"] = "C") -> str:
    """Return the weather
    of a city.

    More text, for programmers.
    """
    return f"{city}: 7 {unit}"


def similarity(left: list[float], right: list[float]) -> float:
    return sum(a * b for a, b in zip(left, right, strict=True))


@pytest.fixture(params=["server", "private engine"])
async def caller(request):
    """Return a model that calls the tool `weather`, on a server or in a private engine."""
    if request.param == "server":
        async with serve(answer(CALL, tokenizer=TOKENIZER), AGENT_TEMPLATE, tokenizer=TOKENIZER) as node:
            yield helexa.Model(ModelLocation(MODEL, node.url)), node.engine
        return
    model = scripted_model(answer(CALL, tokenizer=TOKENIZER), template=AGENT_TEMPLATE, tokenizer=TOKENIZER)
    target = PrivateTarget(None, ModelSpec(model_id=MODEL), ModelSource("file", MODEL))
    target._registry = Registry(model)
    location = ModelLocation(f"private {id(model)}")
    background().targets._cached[location.key] = target
    yield helexa.Model(location), model.engine


async def test_model_can_call_a_python_function_that_is_passed_as_a_tool(caller):
    model, engine = caller
    result = await model.agenerate("How is Oslo?", tools=[weather])
    assert (result.finish_reason, result.text) == ("tool_calls", "")
    (call,) = result.tool_calls
    assert (call.name, call.arguments) == ("weather", {"city": "Oslo", "unit": "C"})
    assert call.id
    prompt = TOKENIZER.decode(engine.requests[-1].prompt)
    assert '"description": "Return the weather of a city."' in prompt
    assert '"a town"' in prompt
    assert weather(**call.arguments) == "Oslo: 7 C"


async def test_result_of_a_tool_call_is_sent_to_the_model(caller):
    model, engine = caller
    first = await model.agenerate("How is Oslo?", tools=[weather])
    history = [{"role": "user", "content": "How is Oslo?"}, first.message, first.tool_calls[0].reply({"degrees": 7})]
    await model.agenerate(history, tools=[weather])
    prompt = TOKENIZER.decode(engine.requests[-1].prompt)
    assert "city=Oslo;unit=C;" in prompt
    assert '{"degrees": 7}' in prompt


async def test_completion_of_a_stream_contains_the_streamed_tool_call(caller):
    model, _ = caller
    async with model.astream("How is Oslo?", tools=[weather]) as stream:
        assert [piece async for piece in stream] == []
    assert stream.completion.tool_calls[0].name == "weather"


@pytest.mark.parametrize(
    ("choice", "sent"),
    [("required", "required"), ("weather", {"type": "function", "function": {"name": "weather"}}), (None, None)],
)
def test_tool_name_as_tool_choice_is_sent_in_openai_format(gateway, choice, sent):
    helexa.generate("hi", target=gateway.url, model="m", tools=[weather], tool_choice=choice)
    assert gateway.requests[0].get("tool_choice") == sent
    function = gateway.requests[0]["tools"][0]["function"]
    assert function["parameters"]["required"] == ["city"]
    assert function["parameters"]["properties"]["unit"]["enum"] == ["C", "F"]


def test_tool_definition_in_openai_format_is_sent_unchanged(gateway):
    tool = {"type": "function", "function": {"name": "f"}}
    helexa.generate("hi", target=gateway.url, model="m", tools=[tool])
    assert gateway.requests[0]["tools"] == [tool]


@pytest.mark.parametrize("tools", ["weather", {"type": "function"}, ["weather"], [lambda *values: 1], [weather, 7]])
def test_invalid_tools_are_rejected(gateway, tools):
    with pytest.raises(helexa.InvalidRequestError, match="tool"):
        helexa.generate("hi", target=gateway.url, model="m", tools=tools)
    assert gateway.requests == []


def test_tool_call_whose_arguments_are_truncated_raises_schema_error(gateway):
    gateway.chunks = ["Wait: ", {"choices": [{"delta": {"tool_calls": [MALFORMED]}}]}]
    with pytest.raises(helexa.SchemaError, match="'weather' are not JSON") as raised:
        helexa.generate("hi", target=gateway.url, model="m", tools=[weather])
    assert raised.value.completion.text == "Wait: "


def test_private_engine_reports_log_probabilities_only_if_requested(small):
    result = small.generate("What is the capital of France?", temperature=0, max_tokens=6, logprobs=3)
    assert "".join(entry.token for entry in result.logprobs).startswith(result.text)
    for entry in result.logprobs:
        assert entry.logprob <= 0
        assert len(entry.top) == 3
        assert entry.top[0].token == entry.token  # temperature 0 selects the most likely token
        assert entry.top[0].logprob == pytest.approx(entry.logprob, abs=1e-4)
        assert bytes(entry.bytes).decode() == entry.token
    assert not small.generate("Hi", max_tokens=2).logprobs


def test_log_probabilities_from_a_server_belong_to_the_streamed_pieces(gateway):
    tokens = [{"token": "Hi", "logprob": -0.5, "bytes": [72, 105], "top_logprobs": [{"token": "Ho", "logprob": -1}]}]
    gateway.chunks = [{"choices": [{"delta": {"content": "Hi"}, "logprobs": {"content": tokens}}]}]
    with helexa.stream("hi", target=gateway.url, model="m", logprobs=True) as stream:
        (piece,) = stream
    assert piece.logprobs == (helexa.TokenLogprob("Hi", -0.5, (72, 105), (helexa.TokenLogprob("Ho", -1.0),)),)
    assert stream.completion.logprobs == piece.logprobs
    assert (gateway.requests[0]["logprobs"], gateway.requests[0]["top_logprobs"]) == (True, 0)


@pytest.mark.parametrize("logprobs", [-1, "3", 1.5])
def test_invalid_number_of_log_probabilities_is_rejected(gateway, logprobs):
    with pytest.raises(helexa.InvalidRequestError, match="logprobs"):
        helexa.generate("hi", target=gateway.url, model="m", logprobs=logprobs)


def test_private_engine_gives_similar_texts_more_similar_embeddings(small):
    cat, kitten, rates = small.embed(
        ["The cat sat on the mat.", "A kitten is sitting on a rug.", "Interest rates rose by half a percent."]
    )
    assert similarity(cat, kitten) > similarity(cat, rates)
    assert math.hypot(*cat) == pytest.approx(1, abs=1e-5)
    assert small.embed("The cat sat on the mat.") == pytest.approx(cat, abs=1e-5)
    assert small.embed([]) == []


def test_long_list_of_texts_is_embedded_in_several_requests(gateway):
    vectors = helexa.embed((f"text {number}" for number in range(300)), target=gateway.url, model="m")
    assert [len(request["input"]) for request in gateway.requests] == [256, 44]
    assert vectors[257] == [1.0, 2.0]


@pytest.mark.parametrize("texts", ["", ["a", ""], [3]])
def test_embed_rejects_empty_texts_and_values_that_are_no_text(gateway, texts):
    with pytest.raises(helexa.InvalidRequestError, match="text"):
        helexa.embed(texts, target=gateway.url, model="m")


async def test_aembed_raises_the_error_class_for_the_servers_error(gateway):
    gateway.error_response = (404, {}, {"error": {"message": "no m", "code": "model_not_found"}})
    with pytest.raises(helexa.ModelNotFoundError):
        await helexa.aembed("hi", target=gateway.url, model="m")
