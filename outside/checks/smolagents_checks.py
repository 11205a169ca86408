"""Checks of smolagents: its model class, and its agent loop with tools."""

from checking import MODEL, URL, check, run
from smolagents import ChatMessage, OpenAIServerModel, ToolCallingAgent, tool

model = OpenAIServerModel(model_id=MODEL, api_base=f"{URL}/v1", api_key="any", max_tokens=200, temperature=0)


@tool
def get_weather(city: str) -> str:
    """Return the weather of a city.

    Args:
        city: its name
    """
    return "clear sky"


def _question(text: str) -> list[ChatMessage]:
    return [ChatMessage(role="user", content=[{"type": "text", "text": text}])]


@check
def plain():
    assert model.generate(_question("Say hello.")).content


@check
def streamed():
    assert "".join(delta.content or "" for delta in model.generate_stream(_question("Say hello.")))


@check
def required_tool():
    answer = model.generate(_question("What is the weather in Paris?"), tools_to_call_from=[get_weather])
    assert answer.tool_calls and answer.tool_calls[0].function.name == "get_weather"


@check
def agent_with_required_tools():
    agent = ToolCallingAgent(tools=[get_weather], model=model, max_steps=2)
    assert agent.run("What is the weather in Paris?") is not None
    assert len(agent.memory.steps) >= 2


run()
