"""Checks of LangChain's ChatOpenAI, with chat completions and with the Responses API."""

import openai
from checking import MODEL, check, expect, run
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

chat = ChatOpenAI(model=MODEL, temperature=0, max_tokens=200, max_retries=0)
responses = ChatOpenAI(model=MODEL, temperature=0, max_tokens=200, max_retries=0, use_responses_api=True)


class Joke(BaseModel):
    """A joke."""

    setup: str = Field(max_length=80)  # a small model may never end a text
    punchline: str = Field(max_length=80)


@tool
def get_weather(city: str) -> str:
    """Return the weather of a city."""
    return f"clear sky in {city}"


def _tool_loop(model: ChatOpenAI) -> None:
    request = [HumanMessage("What is the weather in Paris?")]
    answer = model.bind_tools([get_weather], tool_choice="required").invoke(request)
    (call, *_) = answer.tool_calls
    results = [ToolMessage(get_weather.invoke(call["args"]), tool_call_id=one["id"]) for one in answer.tool_calls]
    assert model.bind_tools([get_weather], tool_choice="none").invoke([*request, answer, *results]).text


@check
def plain():
    answer = chat.invoke([("system", "Be brief."), ("human", "Say hello.")])
    assert answer.text and answer.usage_metadata["output_tokens"] > 0


@check
def streamed():
    assert "".join(chunk.text for chunk in chat.stream("Say hello."))


@check
async def asynchronous():
    assert (await chat.ainvoke("Say hello.")).text


@check
def required_tool_and_its_result():
    _tool_loop(chat)


@check
def schema():
    assert isinstance(chat.with_structured_output(Joke).invoke("Tell a joke about cats."), Joke)


@check
def schema_by_a_tool():
    by_tool = chat.with_structured_output(Joke, method="function_calling")
    assert isinstance(by_tool.invoke("Tell a joke about cats."), Joke)


@check
def responses_plain():
    assert responses.invoke("Say hello.").text


@check
def responses_streamed():
    assert "".join(chunk.text for chunk in responses.stream("Say hello."))


@check
def responses_required_tool_and_its_result():
    _tool_loop(responses)


@check
def responses_schema():
    assert isinstance(responses.with_structured_output(Joke).invoke("Tell a joke about cats."), Joke)


@check
def error_of_an_unknown_model():
    expect(openai.NotFoundError, lambda: ChatOpenAI(model="no-such-model").invoke("Hello"))


run()
