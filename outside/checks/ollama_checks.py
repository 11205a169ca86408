"""Checks of Ollama's Python library: the examples of its README as they are, then tools and errors."""

import asyncio
import importlib.metadata
import re

import ollama
from checking import CHAT_MODELS, MODEL, URL, check, expect, run

CLOUD = ("-cloud", "ollama.com")  # examples for models that run on Ollama's servers
REJECTED = ("ollama.create(", "ollama.copy(", "ollama.delete(", "ollama.push(", "ollama.systemone(")
FORCED = {"num_predict": 200, "temperature": 0}


def blocks() -> list[str]:
    readme = importlib.metadata.metadata("ollama").get_payload()
    found = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    assert len(found) > 15, readme[:200]
    return [block for block in found if not any(mark in block for mark in CLOUD)]


@check
def examples_of_the_readme():
    for block in blocks():
        if not any(mark in block for mark in (*REJECTED, "does-not-yet-exist")):
            code = block.replace("http://localhost:11434", URL)
            exec(compile(code, block[:60], "exec"), {"ollama": ollama, "__name__": "__main__"})


@check
def example_of_errors():
    (block,) = [block for block in blocks() if "does-not-yet-exist" in block]
    error = expect(ollama.ResponseError, lambda: exec(block, {"ollama": ollama}))
    assert error.status_code == 401 and "helexa pull" in error.error  # only an admin may download models


@check
def what_the_gateway_does_not_do():
    examples = [block for block in blocks() if any(mark in block for mark in REJECTED)]
    assert len(examples) == len(REJECTED)
    for example in examples:
        error = expect(ollama.ResponseError, lambda example=example: exec(example, {"ollama": ollama}))
        assert error.status_code == 501, error


@check
def stream_equals_the_answer():
    for model in CHAT_MODELS.values():
        request = {"model": model, "messages": [{"role": "user", "content": "Hello"}]}
        options = {"num_predict": 20, "temperature": 0}
        answer = ollama.chat(**request, options=options)
        parts = list(ollama.chat(**request, options=options, stream=True))
        assert "".join(part.message.content for part in parts) == answer.message.content
        assert parts[-1].eval_count == answer.eval_count > 0 and parts[-1].eval_duration > 0


@check
def tool_call_and_its_result():
    def get_weather(city: str) -> str:
        """Return the weather of a city.

        Args:
            city: name of the city
        """
        return f"clear sky in {city}"

    messages = [{"role": "user", "content": "Call get_weather for the city Paris."}]
    answer = ollama.chat(MODEL, messages, tools=[get_weather], options=FORCED)
    assert answer.message.tool_calls, answer.message.content
    (call, *_) = answer.message.tool_calls
    assert call.function.name == "get_weather" and isinstance(call.function.arguments, dict)
    result = {"role": "tool", "content": get_weather(**call.function.arguments), "tool_name": call.function.name}
    last = ollama.chat(MODEL, [*messages, answer.message, result], options=FORCED)
    assert last.message.content


@check
def closed_stream():
    async def close() -> None:
        client = ollama.AsyncClient()
        async for _ in await client.generate(MODEL, "Tell a long story.", stream=True):
            break

    asyncio.run(close())
    assert ollama.generate(MODEL, "Hello", options={"num_predict": 5}).response


run()
