"""Models of endpoints: lists of different servers, failing endpoints, and detection of the wire API."""

import asyncio

import pytest

from helexa.acp.config import Endpoint, Settings
from helexa.acp.providers.models import ModelCard, ModelChoice, Models, model_cards
from helexa.acp.providers.requests_and_events import ProviderError
from scripted.endpoint import ScriptedEndpoint
from scripted.script_steps import Reject

HELEXA = {
    "id": "Org/M",
    "loaded": True,
    "capabilities": ["text", "vision"],
    "limit": {"context": 131072, "input": 122880, "output": 8192},
    "cost": {"input": 0.5, "output": 1, "cache_read": 0.0},
    "tool_call": True,
    "reasoning": True,
    "max_model_len": 131072,
}
OPENROUTER = {
    "id": "org/m",
    "context_length": 200000,
    "architecture": {"input_modalities": ["text", "image"]},
    "pricing": {"prompt": "0.000002", "completion": "0.000016", "input_cache_read": "0.0000005"},
    "top_provider": {"context_length": 100000, "max_completion_tokens": 64000},
    "supported_parameters": ["tools", "reasoning"],
}
ANTHROPIC = {
    "id": "claude",
    "type": "model",
    "max_input_tokens": 200000,
    "max_tokens": 64000,
    "capabilities": {"image_input": {"supported": True}, "thinking": {"supported": True}},
}


@pytest.mark.parametrize(
    ("entry", "card"),
    [
        (HELEXA, ModelCard("Org/M", 131072, 8192, 0.5, 1.0, 0.0, True, True)),
        (OPENROUTER, ModelCard("org/m", 100000, 64000, 2.0, 16.0, 0.5, True, True)),
        (ANTHROPIC, ModelCard("claude", 200000, 64000, images=True, thinks=True)),
        ({"id": "v", "max_model_len": 4096}, ModelCard("v", 4096)),
        (
            {"id": "l", "type": "vlm", "max_context_length": 32768, "loaded_context_length": 4096},
            ModelCard("l", 4096, images=True),
        ),
        ({"id": "g", "meta": {"n_ctx": 8192, "n_ctx_train": 131072}}, ModelCard("g", 8192)),
        ({"name": "qwen3:8b", "capabilities": ["tools", "thinking"]}, ModelCard("qwen3:8b", images=False, thinks=True)),
        ({"id": "free", "pricing": {"prompt": "-1", "completion": "?"}}, ModelCard("free")),
        ({"id": "odd", "limit": 5, "cost": [], "max_model_len": "many", "capabilities": 7}, ModelCard("odd")),
    ],
)
def test_model_lists_in_the_formats_of_all_servers_are_read(entry, card):
    assert model_cards({"object": "list", "data": [entry]}) == [card]


def test_entries_of_a_model_list_that_are_invalid_or_no_chat_model_are_skipped():
    entries = [{"id": "e", "type": "embeddings"}, {"id": ""}, {"id": 5}, 7, {"id": "a\nb"}, {"id": "a"}, {"id": "a"}]
    assert model_cards({"models": entries}) == [ModelCard("a")]
    assert len(model_cards([{"id": str(n)} for n in range(10_000)])) < 10_000
    with pytest.raises(ValueError, match="not a list of models"):
        model_cards({"data": {}})


def settings(*endpoints):
    return Settings(endpoints=endpoints, default_endpoint=endpoints[0].name)


async def test_refresh_reads_the_model_lists_of_all_endpoints_and_reports_failures():
    listing = {"data": [{"id": "a"}, {"id": "b", "max_model_len": 5000}]}
    refusing = Reject(401, {"error": {"message": "no"}})
    async with ScriptedEndpoint(models=listing) as first, ScriptedEndpoint(models=refusing) as second:
        models = Models(
            settings(
                Endpoint(name="one", base_url=first.url),
                Endpoint(name="two", base_url=second.url, default_model="kept"),
            )
        )
        assert models.listed() == {"one": [], "two": [ModelCard("kept")]}
        assert models.default() == ModelChoice("two", "kept")
        await models.refresh(60)
        assert models.listed() == {"one": [ModelCard("a"), ModelCard("b", 5000)], "two": [ModelCard("kept")]}
        assert models.default() == ModelChoice("one", "a")
        assert list(models.failures()) == ["two"]
        assert models.card(ModelChoice("one", "b")).context == 5000
        models.learn_context(ModelChoice("one", "b"), 4000)
        assert models.card(ModelChoice("one", "b")).context == 4000
        second.models = {"data": [{"id": "c"}]}
        await models.refresh(60)
        assert models.failures() == {}
        assert [card.id for card in models.listed()["two"]] == ["kept", "c"]
        await models.close()


async def test_model_list_of_an_endpoint_that_does_not_respond_times_out():
    async def silent(reader, writer):
        await reader.read()
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    async with server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
        models = Models(settings(Endpoint(name="one", base_url=url)))
        await models.refresh(0.2)
        assert "within 0.2 s" in models.failures()["one"]
        assert models.default() is None
        await models.close()


async def test_built_in_default_model_is_replaced_if_the_endpoint_lists_other_models():
    async with ScriptedEndpoint(models={"data": [{"id": "a"}]}) as endpoint:
        models = Models(settings(Endpoint(name="one", base_url=endpoint.url, default_model="helexa/small")))
        assert models.default() == ModelChoice("one", "helexa/small")
        await models.refresh(60)
        assert models.default() == ModelChoice("one", "a")
        await models.close()


def test_model_name_is_parsed_into_endpoint_and_model():
    models = Models(settings(Endpoint(name="home", base_url="http://a/v1"), Endpoint(name="b", base_url="http://b/v1")))
    assert models.parse("b:x:y") == ModelChoice("b", "x:y")
    assert models.parse("qwen3:8b") == ModelChoice("home", "qwen3:8b")
    assert models.parse("b:") == ModelChoice("home", "b:")
    with pytest.raises(ValueError, match="name is empty"):
        models.parse("")


async def test_error_for_an_unknown_endpoint_names_the_known_ones():
    models = Models(settings(Endpoint(name="home", base_url="http://a/v1")))
    with pytest.raises(ProviderError, match="no endpoint 'else'; known endpoints: home"):
        await models.provider(ModelChoice("else", "m"))


@pytest.mark.parametrize(
    ("routes", "path"),
    [
        ({"/v1/chat/completions", "/v1/messages"}, "/chat/completions"),
        ({"/v1/responses", "/v1/messages"}, "/responses"),
        ({"/v1/messages"}, "/messages"),
    ],
)
async def test_setting_wire_api_auto_probes_which_api_the_endpoint_serves(routes, path):
    async with ScriptedEndpoint() as endpoint:
        endpoint.routes = routes
        models = Models(settings(Endpoint(name="e", base_url=endpoint.url, wire_api="auto")))
        provider = await models.provider(ModelChoice("e", "m"))
        assert provider._api_format.path == path
        assert await models.provider(ModelChoice("e", "n")) is provider
        await models.close()


async def test_setting_wire_api_auto_fails_for_an_endpoint_without_a_known_api():
    async with ScriptedEndpoint() as endpoint:
        endpoint.routes = set()
        models = Models(settings(Endpoint(name="e", base_url=endpoint.url, wire_api="auto")))
        with pytest.raises(ProviderError, match="supports none of the APIs openai-chat"):
            await models.provider(ModelChoice("e", "m"))
        await models.close()
    models = Models(settings(Endpoint(name="e", base_url=endpoint.url, wire_api="auto")))
    with pytest.raises(ProviderError, match="cannot be reached"):
        await models.provider(ModelChoice("e", "m"))
    await models.close()
