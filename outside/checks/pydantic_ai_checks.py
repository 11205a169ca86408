"""Checks of pydantic-ai: agents with chat completions, with the Responses API and with Messages."""

from contextlib import suppress

from checking import MODEL, URL, check, expect, run
from pydantic import BaseModel
from pydantic_ai import Agent, ModelHTTPError, ModelSettings, NativeOutput, ToolOutput
from pydantic_ai.exceptions import UsageLimitExceeded
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.usage import UsageLimits

openai = OpenAIProvider(base_url=f"{URL}/v1", api_key="any")
anthropic = AnthropicProvider(base_url=URL, api_key="any")
chat = OpenAIChatModel(MODEL, provider=openai)
responses = OpenAIResponsesModel(MODEL, provider=openai)
messages = AnthropicModel(MODEL, provider=anthropic)
SHORT = ModelSettings(max_tokens=200, temperature=0)


class City(BaseModel):
    name: str
    country: str


def _forced(model: object) -> None:
    """Check structured output of `model`. pydantic-ai requests it with a tool and `tool_choice: required`."""
    response = Agent(model, output_type=ToolOutput(City), model_settings=SHORT, retries=2).run_sync("Where is Paris?")
    assert isinstance(response.output, City)


@check
def chat_plain():
    assert Agent(chat, instructions="Be brief.", model_settings=SHORT).run_sync("Say hello.").output


@check
async def chat_streamed():
    async with Agent(chat, model_settings=SHORT).run_stream("Say hello.") as stream:
        assert "".join([text async for text in stream.stream_text(delta=True)])


@check
def chat_required_tool():
    _forced(chat)


@check
def chat_schema():
    response = Agent(chat, output_type=NativeOutput(City), model_settings=SHORT).run_sync("Where is Paris?")
    assert isinstance(response.output, City)


@check
def responses_plain():
    assert Agent(responses, model_settings=SHORT).run_sync("Say hello.").output


@check
def responses_required_tool():
    _forced(responses)


@check
def messages_plain():
    assert Agent(messages, model_settings=SHORT).run_sync("Say hello.").output


@check
def messages_required_tool():
    _forced(messages)


@check
def tools_of_an_agent():
    agent = Agent(chat, model_settings=SHORT)
    cities: list[str] = []

    @agent.tool_plain
    def get_weather(city: str) -> str:
        """Return the weather of a city."""
        cities.append(city)
        return f"clear sky in {city}"

    # The small model often calls the tool again instead of answering, in float32 too. The server is not the cause, so
    # the check requires a correct call, and an answer only if the model ends before the limit.
    with suppress(UsageLimitExceeded):
        assert agent.run_sync("What is the weather in Paris?", usage_limits=UsageLimits(request_limit=6)).output
    assert any("Paris" in city for city in cities), f"the tool was called with the cities {cities}"


@check
def error_of_an_unknown_model():
    agent = Agent(OpenAIChatModel("no-such-model", provider=openai))
    assert expect(ModelHTTPError, lambda: agent.run_sync("Hello")).status_code == 404


run()
