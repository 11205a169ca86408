"""Checks of openai-agents: an agent that must call a tool, with the Responses API and with chat completions."""

import openai
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    RunConfig,
    Runner,
    function_tool,
)
from checking import MODEL, check, expect, run
from openai import AsyncOpenAI
from pydantic import BaseModel

QUIET = RunConfig(tracing_disabled=True)
KINDS = {"responses": OpenAIResponsesModel, "chat": OpenAIChatCompletionsModel}


class City(BaseModel):
    name: str


def _model(kind: str, name: str = MODEL):
    return KINDS[kind](name, AsyncOpenAI(max_retries=0))


async def _plain(kind: str) -> None:
    agent = Agent("greeter", model=_model(kind), model_settings=ModelSettings(temperature=0, max_tokens=60))
    assert (await Runner.run(agent, "Say hello.", run_config=QUIET)).final_output


async def _streamed(kind: str) -> None:
    agent = Agent("greeter", model=_model(kind), model_settings=ModelSettings(temperature=0, max_tokens=60))
    response = Runner.run_streamed(agent, "Say hello.", run_config=QUIET)
    assert [event async for event in response.stream_events()]
    assert response.final_output


async def _required(kind: str) -> None:
    cities = []

    @function_tool
    def get_weather(city: str) -> str:
        """Return the weather of a city."""
        cities.append(city)
        return "clear sky"

    agent = Agent(
        "weather",
        model=_model(kind),
        tools=[get_weather],
        tool_use_behavior="stop_on_first_tool",  # a small model may never end its answer
        model_settings=ModelSettings(tool_choice="required", parallel_tool_calls=False, temperature=0, max_tokens=200),
    )
    response = await Runner.run(agent, "What is the weather in Paris?", run_config=QUIET, max_turns=8)
    assert cities and response.final_output


async def _schema(kind: str) -> None:
    agent = Agent(
        "namer", model=_model(kind), output_type=City, model_settings=ModelSettings(temperature=0, max_tokens=100)
    )
    assert isinstance((await Runner.run(agent, "I live in Paris.", run_config=QUIET)).final_output, City)


@check
async def responses_plain():
    await _plain("responses")


@check
async def responses_streamed():
    await _streamed("responses")


@check
async def responses_required_tool():
    await _required("responses")


@check
async def responses_schema():
    await _schema("responses")


@check
async def chat_plain():
    await _plain("chat")


@check
async def chat_streamed():
    await _streamed("chat")


@check
async def chat_required_tool():
    await _required("chat")


@check
async def chat_schema():
    await _schema("chat")


@check
def error_of_an_unknown_model():
    agent = Agent("none", model=_model("responses", "no-such-model"))
    expect(openai.NotFoundError, lambda: Runner.run_sync(agent, "Hello", run_config=QUIET))


run()
