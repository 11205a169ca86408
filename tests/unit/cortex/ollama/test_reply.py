"""Translation of nodes' answers, complete and streamed, to Ollama's format."""

import itertools
import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortex.anthropic.conversation_node import COMPLETION, STREAM
from cortex.anthropic.openai_stream import DONE, call_delta, calls, delta, event, finish, text_chunk, usage
from helexa.core.errors import ApiError, overloaded
from helexa.cortex.ollama.reply import MAX_BUFFERED_CHARS, Answer, AnswerStream, complete_answer, embeddings_answer
from helexa.cortex.ollama.to_openai import Translation
from helexa.cortex.request_record import RequestRecord
from helexa.cortex.upstream.usage_meter import Meter

CHAT = Translation("/api/chat", "small", "/v1/chat/completions", b"{}", stream=True)
GENERATE = Translation("/api/generate", "small", "/v1/completions", b"{}", stream=True)
CALLS = [
    {"id": "call_1", "function": {"index": 0, "name": "Bash", "arguments": {"command": "ls"}}},
    {"id": "call_2", "function": {"index": 1, "name": "Read", "arguments": {"file_path": "/a"}}},
]


def record(**fields: Any) -> RequestRecord:
    times: dict[str, Any] = {"started": 0.0, "loading": 0.25, "waited": 0.5}
    return RequestRecord("r", "/api/chat", "127.0.0.1", **times | fields)


def new_stream(translation: Translation = CHAT, **times: Any) -> AnswerStream:
    return AnswerStream(Answer(translation, record(**{"started": time.perf_counter(), **times})))


def lines(data: bytes) -> list[dict[str, Any]]:
    assert data.endswith(b"\n") or not data
    return [json.loads(line) for line in data.splitlines()]


def streamed(*chunks: bytes, translation: Translation = CHAT) -> list[dict[str, Any]]:
    stream = new_stream(translation)
    return lines(b"".join([*map(stream.feed, chunks), stream.finish()]))


def joined(parts: list[dict[str, Any]], name: str) -> str:
    return "".join(part["message"].get(name, "") for part in parts)


def test_ollama_stream_has_text_thinking_and_complete_tool_calls() -> None:
    parts = streamed(*STREAM)
    assert (joined(parts, "thinking"), joined(parts, "content")) == ("They greet.", "Hello é")
    assert [part["message"]["tool_calls"] for part in parts if "tool_calls" in part["message"]] == [CALLS]
    assert all(part["model"] == "small" and part["message"]["role"] == "assistant" for part in parts)
    assert [part["done"] for part in parts] == [False] * (len(parts) - 1) + [True]
    last = parts[-1]
    assert (last["done_reason"], last["prompt_eval_count"], last["eval_count"]) == ("stop", 7, 9)


@given(st.lists(st.integers(0, 400), max_size=12))
def test_ollama_stream_is_the_same_for_all_chunk_sizes_of_the_node(cuts: list[int]) -> None:
    data = b"".join(STREAM)
    places = sorted({0, len(data), *(cut * len(data) // 400 for cut in cuts)})
    chunks = [data[start:end] for start, end in itertools.pairwise(places)]

    def content(parts: list[dict[str, Any]]) -> list[Any]:
        return [part["message"] for part in parts]

    assert content(streamed(*chunks)) == content(streamed(*STREAM))


def test_complete_ollama_answer_equals_the_stream() -> None:
    answer = complete_answer(Answer(CHAT, record()), COMPLETION)
    assert answer["message"] == {
        "role": "assistant",
        "content": "Hello é",
        "thinking": "They greet.",
        "tool_calls": CALLS,
    }
    assert (answer["done"], answer["done_reason"], answer["eval_count"]) == (True, "stop", 9)


def test_generate_answer_has_its_text_in_response_and_reasoning_in_thinking() -> None:
    parts = streamed(delta(reasoning_content="Hm"), text_chunk("Yes"), finish("length"), DONE, translation=GENERATE)
    assert [(part["response"], part.get("thinking")) for part in parts] == [("", "Hm"), ("Yes", None), ("", None)]
    assert parts[-1]["done_reason"] == "length"


def test_text_completion_becomes_the_field_response_of_a_generate_answer() -> None:
    def text(value: str, reason: str | None = None) -> bytes:
        return event({"choices": [{"index": 0, "text": value, "finish_reason": reason}]})

    parts = streamed(text("a"), text("b", "stop"), usage(3, 2), DONE, translation=GENERATE)
    assert ["".join(part["response"] for part in parts), parts[-1]["eval_count"]] == ["ab", 2]
    choice = {"text": "ab", "finish_reason": "stop"}
    choice |= {"logprobs": {"tokens": ["a"], "token_logprobs": [-0.5], "top_logprobs": [{"a": -0.5, "b": -1.0}]}}
    answer = complete_answer(Answer(GENERATE, record()), {"choices": [choice]})
    top = [{"token": "a", "logprob": -0.5}, {"token": "b", "logprob": -1.0}]
    assert (answer["response"], answer["logprobs"][0]) == ("ab", {"token": "a", "logprob": -0.5, "top_logprobs": top})


def test_log_probabilities_of_an_ollama_chat_are_a_flat_list() -> None:
    entry = {"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": [{"token": "a", "logprob": -0.5}]}
    chunk = event({"choices": [{"index": 0, "delta": {"content": "a"}, "logprobs": {"content": [entry]}}]})
    assert streamed(chunk, finish(), DONE)[0]["logprobs"] == [entry]


def test_durations_in_an_ollama_answer_are_those_measured_by_the_node() -> None:
    timing = {"prefill_ms": 30, "decode_ms": 50, "prefill_tokens": 4}
    last = streamed(text_chunk("a"), finish(), usage(7, 2, helexa_timing=timing), DONE)[-1]
    assert (last["prompt_eval_duration"], last["eval_duration"]) == (30_000_000, 50_000_000)
    assert last["load_duration"] == 250_000_000
    assert last["total_duration"] > 0


def test_durations_are_measured_by_the_gateway_if_the_node_reports_none() -> None:
    meter = Meter(streamed=True)
    meter.first_at = 2.0
    stream = new_stream(started=1.0, waited=0.5, meter=meter)
    last = lines(stream.feed(text_chunk("a") + finish() + usage(7, 2) + DONE))[-1]
    assert last["prompt_eval_duration"] == 500_000_000
    assert last["eval_duration"] == pytest.approx(last["total_duration"] - 1_000_000_000, abs=10)


def test_half_of_a_surrogate_pair_in_arguments_is_replaced() -> None:
    parts = streamed(calls(call_delta(0, r'{"p": "\ud83d x"}', name="f", id="c")), finish("tool_calls"), DONE)
    ((call,),) = [part["message"]["tool_calls"] for part in parts if "tool_calls" in part["message"]]
    assert call["function"]["arguments"] == {"p": "\ufffd x"}


def test_incomplete_tool_call_is_returned_as_text_of_the_ollama_answer() -> None:
    cut = streamed(calls(call_delta(0, '{"a":', name="f", id="c")), finish("length"), DONE)
    assert json.loads(joined(cut, "content")) == {"name": "f", "arguments": '{"a":'}
    assert (cut[-1]["done_reason"], "tool_calls" in cut[0]["message"]) == ("length", False)


@pytest.mark.parametrize(
    ("chunks", "message"),
    [
        ([text_chunk("a"), DONE], "without a finish reason"),
        ([text_chunk("a")], "without a finish reason"),
        ([finish("strange"), DONE], "finish reason 'strange'"),
        ([event({"error": {"message": "the engine died", "type": "api_error"}})], "the engine died"),
        ([event([])], "not a JSON object"),
        ([b"data: {\n\n"], "malformed"),
        ([calls(1)], "not a JSON object"),
        ([calls(call_delta(0, "x" * (MAX_BUFFERED_CHARS + 1), name="f"))], "characters of arguments"),
        ([calls(*(call_delta(index, "", name="f") for index in range(600)))], "tool calls, or more than"),
    ],
)
def test_ollama_stream_that_fails_ends_with_one_error_line(chunks: list[bytes], message: str) -> None:
    stream = new_stream()
    parts = lines(b"".join([*map(stream.feed, chunks), stream.finish(), stream.fail(overloaded("later", 1))]))
    assert list(parts[-1]) == ["error"] and message in parts[-1]["error"]
    assert ["error" in part for part in parts].count(True) == 1
    assert stream.failure is not None


@pytest.mark.parametrize("completion", [{}, {"choices": []}, {"choices": [1]}, {"choices": [{"message": {}}]}])
def test_malformed_completion_of_a_node_is_a_502(completion: Any) -> None:
    with pytest.raises(ApiError) as caught:
        complete_answer(Answer(CHAT, record()), completion)
    assert caught.value.status == 502


def embedded(api: str, dimensions: int | None = None) -> Any:
    vectors = [{"index": 1, "embedding": [0.6, 0.8]}, {"index": 0, "embedding": [3.0, 4.0, 12.0]}]
    body = json.dumps({"data": vectors, "usage": {"prompt_tokens": 5}}).encode()
    translation = Translation(api, "m", "/v1/embeddings", b"{}", dimensions=dimensions)
    return json.loads(embeddings_answer(translation, record(), body))


def test_embeddings_in_an_ollama_answer_keep_their_order_and_values() -> None:
    answer = embedded("/api/embed")
    assert (answer["embeddings"], answer["prompt_eval_count"]) == ([[3.0, 4.0, 12.0], [0.6, 0.8]], 5)
    assert embedded("/api/embeddings") == {"embedding": [3.0, 4.0, 12.0]}


def test_shortened_embeddings_have_the_length_1() -> None:
    assert embedded("/api/embed", 2)["embeddings"][0] == pytest.approx([0.6, 0.8])
