"""Checks of LangChain's ChatAnthropic."""

from typing import Literal

import anthropic
from checking import MODEL, check, expect, run
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from pydantic import BaseModel, Field

chat = ChatAnthropic(model=MODEL, max_tokens=200, max_retries=0)


class Joke(BaseModel):
    """A joke."""

    setup: str = Field(max_length=80)  # a small model may never end a text
    punchline: str = Field(max_length=80)


class Animal(BaseModel):
    """An animal."""

    kind: Literal["cat", "dog"]  # LangChain sends no maximum length of a text in an output format
    legs: int


@tool
def get_weather(city: str) -> str:
    """Return the weather of a city."""
    return f"clear sky in {city}"


@check
def plain():
    answer = chat.invoke([("system", "Be brief."), ("human", "Say hello.")])
    assert answer.text and answer.usage_metadata["output_tokens"] > 0


@check
def streamed():
    assert "".join(chunk.text for chunk in chat.stream("Say hello."))


@check
def forced_tool_and_its_result():
    request = [HumanMessage("What is the weather in Paris?")]
    answer = chat.bind_tools([get_weather], tool_choice="any").invoke(request)
    assert answer.tool_calls
    results = [ToolMessage("clear sky", tool_call_id=call["id"]) for call in answer.tool_calls]
    assert chat.bind_tools([get_weather]).invoke([*request, answer, *results]).content


@check
def schema_by_a_tool():
    assert isinstance(chat.with_structured_output(Joke).invoke("Tell a joke about cats."), Joke)


@check
def schema():
    by_schema = chat.with_structured_output(Animal, method="json_schema")
    assert isinstance(by_schema.invoke("Which animal purrs?"), Animal)


@check
def error_of_an_unknown_model():
    expect(anthropic.NotFoundError, lambda: ChatAnthropic(model="no-such-model").invoke("Hello"))


run()
