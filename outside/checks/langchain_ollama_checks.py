"""Checks of langchain-ollama: chats, streams, tools, structured output and embeddings."""

from checking import MODEL, check, expect, run
from langchain_ollama import ChatOllama, OllamaEmbeddings, OllamaLLM
from ollama import ResponseError
from pydantic import BaseModel

chat = ChatOllama(model=MODEL, validate_model_on_init=True, num_predict=100, temperature=0, keep_alive="30m")


class Person(BaseModel):
    """A person."""

    name: str


def get_weather(city: str) -> str:
    """Return the weather of a city."""
    return f"clear sky in {city}"


@check
def plain():
    answer = chat.invoke([("system", "Be brief."), ("human", "Say hello.")])
    assert answer.content and answer.usage_metadata["output_tokens"] > 0
    assert answer.response_metadata["done_reason"] in ("stop", "length")


@check
def streamed():
    chunks = list(chat.stream("Say hello."))
    assert "".join(chunk.content for chunk in chunks)
    assert chunks[-1].response_metadata or any(chunk.response_metadata for chunk in chunks)


@check
def text_completion():
    assert OllamaLLM(model=MODEL, num_predict=10).invoke("Hello")


@check
def tool_call():
    answer = chat.bind_tools([get_weather]).invoke("Call get_weather for the city Paris.")
    assert answer.tool_calls and answer.tool_calls[0]["name"] == "get_weather", answer.content


@check
def structured_output():
    person = chat.with_structured_output(Person, method="json_schema").invoke("My name is Ada.")
    assert isinstance(person, Person)


@check
def embeddings():
    vectors = OllamaEmbeddings(model=MODEL).embed_documents(["The sky is blue", "Grass is green"])
    assert len(vectors) == 2 and len(vectors[0]) > 100


@check
def error_of_an_unknown_model():
    error = expect(ResponseError, lambda: ChatOllama(model="no-such-model").invoke("Hello"))
    assert error.status_code == 404


run()
