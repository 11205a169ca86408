"""Checks of litellm as a client, with its providers for OpenAI, vLLM and Anthropic."""

import json

import litellm
from checking import MODEL, URL, check, expect, run

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
ROUTES = {
    "openai": {"model": f"openai/{MODEL}", "api_base": f"{URL}/v1"},
    "vllm": {"model": f"hosted_vllm/{MODEL}", "api_base": f"{URL}/v1"},
    "anthropic": {"model": f"anthropic/{MODEL}", "api_base": URL},
}
QUESTION = [{"role": "user", "content": "What is the weather in Paris?"}]


def _ask(route: str, **more: object):
    request = {"messages": QUESTION, "max_tokens": 200, "temperature": 0, "api_key": "any", "num_retries": 0}
    return litellm.completion(**ROUTES[route] | request | more)


@check
def plain():
    for route in ROUTES:
        assert _ask(route, max_tokens=20).choices[0].message.content, route


@check
def streamed():
    for route in ROUTES:
        text = "".join(chunk.choices[0].delta.content or "" for chunk in _ask(route, max_tokens=20, stream=True))
        assert text, route


@check
def required_tool():
    for route in ROUTES:
        message = _ask(route, tools=[WEATHER], tool_choice="required").choices[0].message
        assert "city" in json.loads(message.tool_calls[0].function.arguments), route


@check
def schema():
    schema = {"type": "object", "properties": {"sky": {"type": "string"}}, "required": ["sky"]}
    form = {"type": "json_schema", "json_schema": {"name": "weather", "schema": schema}}
    for route in ("openai", "vllm"):
        assert "sky" in json.loads(_ask(route, response_format=form).choices[0].message.content), route


@check
def error_of_an_unknown_model():
    for route in ROUTES:
        name = ROUTES[route]["model"].partition("/")[0]
        expect(litellm.NotFoundError, lambda route=route, name=name: _ask(route, model=f"{name}/no-such-model"))


run()
