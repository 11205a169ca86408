"""Checks of Anthropic's Python library, used as its README describes."""

import anthropic
from anthropic import Anthropic, beta_tool
from checking import CHAT_MODELS, MODEL, check, expect, run

client = Anthropic(max_retries=0)

WEATHER = {
    "name": "get_weather",
    "description": "Return the weather of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
QUESTION = [{"role": "user", "content": "What is the weather in Paris?"}]


@check
def models():
    page = client.models.list(limit=1)
    assert len(page.data) == 1 and page.data[0].type == "model" and page.data[0].display_name
    assert MODEL in [model.id for model in client.models.list()]
    assert client.models.retrieve(MODEL).id == MODEL


@check
def message():
    for model in CHAT_MODELS.values():
        response = client.messages.create(
            model=model, max_tokens=40, messages=[{"role": "user", "content": "Hello, Claude"}]
        )
        assert response.content[0].type == "text" and response.content[0].text
        assert response.usage.input_tokens > 0 and 0 < response.usage.output_tokens <= 40


@check
def message_streamed():
    request = [{"role": "user", "content": "Hello, Claude"}]
    kinds = [event.type for event in client.messages.create(model=MODEL, max_tokens=40, messages=request, stream=True)]
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop" and "content_block_delta" in kinds


@check
def stream_helper():
    with client.messages.stream(
        model=MODEL, max_tokens=40, system="Be brief.", messages=[{"role": "user", "content": "Say hello there!"}]
    ) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text and final.content[0].text == text


@check
def usage_at_the_start_of_a_stream():
    request = {"model": MODEL, "max_tokens": 8, "messages": QUESTION}
    whole = client.messages.create(**request).usage
    first = next(iter(client.messages.create(**request, stream=True))).message.usage
    total = [usage.input_tokens + (usage.cache_read_input_tokens or 0) for usage in (whole, first)]
    assert total[0] == total[1], f"{total[0]} tokens in the message, {total[1]} in message_start"


@check
def count_tokens():
    counted = client.messages.count_tokens(model=MODEL, messages=QUESTION).input_tokens
    usage = client.messages.create(model=MODEL, max_tokens=1, messages=QUESTION).usage
    assert counted == usage.input_tokens + (usage.cache_read_input_tokens or 0)


@check
def forced_tool_and_its_result():
    first = client.messages.create(
        model=MODEL,
        max_tokens=200,
        messages=QUESTION,
        tools=[WEATHER],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},  # small models may repeat calls
    )
    assert first.stop_reason == "tool_use"
    (call,) = [block for block in first.content if block.type == "tool_use"][:1]
    assert call.input.keys() == {"city"}
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "clear sky"}
    second = client.messages.create(
        model=MODEL,
        max_tokens=60,
        messages=[*QUESTION, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}],
        tools=[WEATHER],
        tool_choice={"type": "none"},
    )
    assert second.content[0].type == "text"


@check
def tool_runner():
    called = []

    @beta_tool
    def get_weather(city: str) -> str:
        """Return the weather of a city.

        Args:
            city: its name
        """
        called.append(city)
        return "clear sky"

    runner = client.beta.messages.tool_runner(
        model=MODEL,
        max_tokens=200,
        tools=[get_weather],
        tool_choice={"type": "tool", "name": "get_weather"},
        messages=QUESTION,
        max_iterations=2,
    )
    messages = list(runner)
    assert called and messages[0].stop_reason == "tool_use" and len(messages) == 2


@check
def tool_runner_streamed():
    called = []

    @beta_tool
    def get_weather(city: str) -> str:
        """Return the weather of a city.

        Args:
            city: its name
        """
        called.append(city)
        return "clear sky"

    runner = client.beta.messages.tool_runner(
        model=MODEL,
        max_tokens=200,
        tools=[get_weather],
        tool_choice={"type": "tool", "name": "get_weather"},
        messages=QUESTION,
        max_iterations=2,
        stream=True,
    )
    for stream in runner:
        assert [event.type for event in stream]
    assert called


@check
def output_by_a_schema():
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string"}},
        "required": ["name"],
        "additionalProperties": False,
    }
    response = client.messages.create(
        model=MODEL,
        max_tokens=100,
        messages=[{"role": "user", "content": "My name is Ada."}],
        output_config={"format": {"type": "json_schema", "schema": schema}},
    )
    assert '"name"' in response.content[0].text


@check
def error_of_an_unknown_model():
    request = {"model": "no-such-model", "max_tokens": 8, "messages": QUESTION}
    error = expect(anthropic.NotFoundError, lambda: client.messages.create(**request))
    assert error.body["error"]["type"] == "not_found_error"


@check
def error_of_a_bad_value():
    request = {"model": MODEL, "max_tokens": 8, "messages": QUESTION, "extra_body": {"temperature": 17}}
    error = expect(anthropic.BadRequestError, lambda: client.messages.create(**request))
    assert error.body["error"]["type"] == "invalid_request_error"


@check
def error_of_batches():
    error = expect(anthropic.APIStatusError, client.messages.batches.list)
    assert error.body["type"] == "error"


run()
