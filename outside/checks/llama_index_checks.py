"""Checks of LlamaIndex's client for servers with OpenAI's API."""

from checking import MODEL, URL, check, run
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

model = OpenAILike(
    model=MODEL,
    api_base=f"{URL}/v1",
    api_key="any",
    is_chat_model=True,
    is_function_calling_model=True,
    max_tokens=200,
    temperature=0,
    max_retries=0,
    context_window=32768,
)
HELLO = [ChatMessage(role="user", content="Say hello.")]


class City(BaseModel):
    """A city."""

    name: str


def get_weather(city: str) -> str:
    """Return the weather of a city."""
    return f"clear sky in {city}"


@check
def plain():
    assert model.chat(HELLO).message.content


@check
def completion():
    assert model.complete("Say hello.").text


@check
def streamed():
    assert "".join(chunk.delta or "" for chunk in model.stream_chat(HELLO))


@check
def required_tool():
    tool = FunctionTool.from_defaults(get_weather)
    answer = model.chat_with_tools([tool], user_msg="What is the weather in Paris?", tool_required=True)
    calls = model.get_tool_calls_from_response(answer)
    assert calls and calls[0].tool_name == "get_weather"


@check
def schema_by_a_tool():
    response = model.as_structured_llm(City).chat([ChatMessage(role="user", content="I live in Paris.")])
    assert isinstance(response.raw, City)


run()
