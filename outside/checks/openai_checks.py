"""Checks of OpenAI's Python library, used as its README describes."""

import asyncio
import json

import openai
from checking import BASE_MODEL, CHAT_MODELS, MODEL, check, expect, run
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel

client = OpenAI(max_retries=0)

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Return the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 40}},
            "required": ["city"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}
QUESTION = [{"role": "user", "content": "What is the weather in Paris?"}]


class Event(BaseModel):
    name: str
    day: str


@check
def models():
    ids = [model.id for model in client.models.list()]
    assert MODEL in ids
    assert client.models.retrieve(MODEL).id == MODEL


@check
def chat():
    for model in CHAT_MODELS.values():
        completion = client.chat.completions.create(
            model=model,
            messages=[
                {"role": "developer", "content": "Talk like a pirate."},
                {"role": "user", "content": "How do I check if a Python object is an instance of a class?"},
            ],
            max_completion_tokens=40,
        )
        assert completion.choices[0].message.content
        assert completion.usage and completion.usage.completion_tokens <= 40


@check
def chat_streamed():
    for model in CHAT_MODELS.values():
        stream = client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": "Say this is a test"}], stream=True, max_tokens=30
        )
        text = ""
        for chunk in stream:
            text += chunk.choices[0].delta.content or ""
        assert text


@check
def chat_streamed_with_usage():
    stream = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Say this is a test"}],
        stream=True,
        stream_options={"include_usage": True},
        max_tokens=30,
    )
    *chunks, last = list(stream)
    assert all(chunk.usage is None for chunk in chunks)
    assert last.choices == [] and last.usage and last.usage.prompt_tokens > 0


@check
async def chat_asynchronous():
    async with AsyncOpenAI(max_retries=0) as asynchronous:
        request = [{"role": "user", "content": "Say this is a test"}]
        answers = await asyncio.gather(
            *[asynchronous.chat.completions.create(model=MODEL, messages=request, max_tokens=8) for _ in range(4)]
        )
    assert all(answer.choices[0].message.content for answer in answers)


@check
def completion_of_a_base_model():
    completion = client.completions.create(model=BASE_MODEL, prompt="The capital of France is", max_tokens=8)
    assert completion.choices[0].text


@check
def required_tool_call_and_its_result():
    first = client.chat.completions.create(model=MODEL, messages=QUESTION, tools=[WEATHER], tool_choice="required")
    choice = first.choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.tool_calls
    call = choice.message.tool_calls[0]
    assert "city" in json.loads(call.function.arguments)
    result = {"role": "tool", "tool_call_id": call.id, "content": '{"sky": "clear"}'}
    second = client.chat.completions.create(
        model=MODEL, messages=[*QUESTION, choice.message, result], tools=[WEATHER], tool_choice="none", max_tokens=60
    )
    assert second.choices[0].message.content


@check
def named_tool_call_streamed():
    with client.chat.completions.stream(
        model=MODEL,
        messages=QUESTION,
        tools=[WEATHER],
        tool_choice={"type": "function", "function": {"name": "get_weather"}},
    ) as stream:
        events = [event.type for event in stream]
        message = stream.get_final_completion().choices[0].message
    assert "tool_calls.function.arguments.done" in events
    assert message.tool_calls and "city" in json.loads(message.tool_calls[0].function.arguments)


@check
def parsed_answer():
    completion = client.chat.completions.parse(
        model=MODEL,
        messages=[{"role": "user", "content": "Alice goes to a science fair on Friday."}],
        response_format=Event,
        max_tokens=200,
    )
    assert isinstance(completion.choices[0].message.parsed, Event)


@check
def json_object():
    completion = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": 'Return this JSON object: {"name": "Ada"}'}],
        response_format={"type": "json_object"},
        temperature=0,
        max_tokens=200,
    )
    assert isinstance(json.loads(completion.choices[0].message.content or ""), dict)


@check
def logprobs():
    completion = client.chat.completions.create(
        model=MODEL, messages=QUESTION, max_tokens=2, logprobs=True, top_logprobs=3
    )
    response = completion.choices[0].logprobs
    assert response and response.content and len(response.content[0].top_logprobs) == 3


@check
def response():
    response = client.responses.create(
        model=MODEL, instructions="You are a coding assistant.", input="Say this is a test", max_output_tokens=40
    )
    assert response.output_text


@check
def response_streamed():
    stream = client.responses.create(model=MODEL, input="Say this is a test", stream=True, max_output_tokens=40)
    kinds = [event.type for event in stream]
    assert kinds[0] == "response.created" and kinds[-1] in ("response.completed", "response.incomplete")
    assert "response.output_text.delta" in kinds


@check
def response_that_goes_on():
    first = client.responses.create(model=MODEL, input="My name is Ada.", max_output_tokens=20)
    second = client.responses.create(
        model=MODEL, input="What is my name?", previous_response_id=first.id, max_output_tokens=20
    )
    assert second.previous_response_id == first.id
    assert client.responses.retrieve(second.id).output_text == second.output_text
    client.responses.delete(first.id)


@check
def response_with_a_required_tool():
    tool = {"type": "function", **WEATHER["function"]}
    response = client.responses.create(model=MODEL, input=QUESTION, tools=[tool], tool_choice="required")
    (call,) = [item for item in response.output if item.type == "function_call"][:1]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": '{"sky": "clear"}'}
    second = client.responses.create(
        model=MODEL, input=[*QUESTION, *response.output, result], tools=[tool], tool_choice="none", max_output_tokens=60
    )
    assert second.output_text


@check
def response_parsed():
    response = client.responses.parse(
        model=MODEL, input="Alice goes to a science fair on Friday.", text_format=Event, max_output_tokens=200
    )
    assert isinstance(response.output_parsed, Event)


@check
def response_input_items():
    response = client.responses.create(model=MODEL, input="Say this is a test", max_output_tokens=10)
    (item,) = list(client.responses.input_items.list(response.id))
    assert item.type == "message"


@check
def error_of_an_unknown_model():
    request = {"model": "no-such-model", "messages": QUESTION}
    error = expect(openai.NotFoundError, lambda: client.chat.completions.create(**request))
    assert error.code == "model_not_found"


@check
def error_of_a_bad_value():
    request = {"model": MODEL, "messages": QUESTION, "temperature": 17}
    error = expect(openai.BadRequestError, lambda: client.chat.completions.create(**request))
    assert error.param == "temperature"


@check
def error_of_a_long_prompt():
    request = {"model": MODEL, "messages": [{"role": "user", "content": "word " * 40_000}]}
    error = expect(openai.BadRequestError, lambda: client.chat.completions.create(**request))
    assert error.code == "context_length_exceeded"


run()
