"""Models that reject request parameters which other models of the same API accept."""

from typing import Any

import pytest

from bench.scripted_server import (
    DONE,
    Script,
    ScriptedServer,
    Step,
    client_of,
    delta_chunk,
    finish_chunk,
    streamed_script,
)
from bench.virtual_time import run
from helexa.bench.prompts_and_load_generators import PromptRequest, Turn
from helexa.bench.request_records_and_metrics import RequestRecord

PROMPT = PromptRequest("m", [Turn("user", "hi")], max_tokens=7, fixed_length=True)


def openai(message: str, param: str | None, code: str) -> Script:
    error = {"message": message, "type": "invalid_request_error", "param": param, "code": code}
    return Script(status=400, body={"error": error})


def anthropic(message: str) -> Script:
    return Script(status=400, body={"type": "error", "error": {"type": "invalid_request_error", "message": message}})


ONLY_COMPLETION_TOKENS = openai(
    "Unsupported parameter: 'max_tokens' is not supported with this model. Use 'max_completion_tokens' instead.",
    "max_tokens",
    "unsupported_parameter",
)
NO_TEMPERATURE = openai(
    "Unsupported value: 'temperature' does not support 0 with this model. Only the default (1) value is supported.",
    "temperature",
    "unsupported_value",
)


def records_of(server: ScriptedServer, times: int, kind: Any = "openai") -> list[RequestRecord]:
    async def ask() -> list[RequestRecord]:
        async with client_of(server, kind) as client:
            return [await client.ask(PROMPT) for _ in range(times)]

    return run(ask())


def test_openai_request_is_retried_without_rejected_parameters() -> None:
    scripts = [ONLY_COMPLETION_TOKENS, NO_TEMPERATURE, streamed_script(0.5, 2, 0.3), streamed_script(0.5, 2, 0.3)]
    server = ScriptedServer(scripts)
    records = records_of(server, 2)
    assert [record.status for record in records] == ["ok", "ok"]
    assert [record.http_status for record in records] == [200, 200]
    assert len(server.bodies) == 4  # the second request sends none of the rejected parameters
    for body in server.bodies[2:]:
        assert body["max_completion_tokens"] == 7
        assert body["top_p"] == 1
        assert not {"max_tokens", "temperature"} & body.keys()
    assert [record.deltas[0].at - record.sent for record in records] == pytest.approx([0.5, 0.5])


def test_anthropic_request_is_retried_without_a_rejected_parameter() -> None:
    stop = {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 1}}
    text = {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "a"}}
    success = Script([Step(0.5, [text, stop, {"type": "message_stop"}])])
    both = anthropic("`temperature` and `top_p` cannot both be specified for this model. Please use only one.")
    server = ScriptedServer([both, anthropic("`temperature` is deprecated for this model."), success])
    assert records_of(server, 1, "anthropic")[0].status == "ok"
    assert [{"temperature", "top_p"} & body.keys() for body in server.bodies] == [
        {"temperature", "top_p"},
        {"temperature"},
        set(),
    ]
    assert all(body["max_tokens"] == 7 for body in server.bodies)


@pytest.mark.parametrize(
    "script",
    [
        openai("max_tokens is too large: 7.", "max_tokens", "invalid_value"),
        openai("Unsupported parameter: 'model'", "model", "unsupported_parameter"),
        Script(status=400, body={"error": "temperature is not supported"}),
        Script(status=404, body=ONLY_COMPLETION_TOKENS.body),
    ],
)
def test_errors_that_do_not_reject_a_removable_parameter_are_not_retried(script: Script) -> None:
    server = ScriptedServer([script])
    assert records_of(server, 1)[0].status == "error"
    assert len(server.bodies) == 1


def test_retries_end_when_every_removable_parameter_was_rejected() -> None:
    def reject(number: int, at: float) -> Script:
        body = server.bodies[number]
        sent = [name for name in ("max_tokens", "top_p", "temperature", "stream_options", "messages") if name in body]
        return openai("Unsupported parameter", sent[0], "unsupported_parameter")

    server = ScriptedServer(reject)
    record = records_of(server, 1)[0]
    assert (record.status, record.http_status, len(server.bodies)) == ("error", 400, 5)


def test_request_is_retried_without_stream_options_if_the_server_rejects_them() -> None:
    unknown = openai("Unrecognized request argument supplied: stream_options", None, "")
    server = ScriptedServer(
        [unknown, Script([Step(0.5, [delta_chunk("a")]), Step(0.3, [delta_chunk("b"), finish_chunk(), DONE])])]
    )
    assert records_of(server, 1)[0].status == "ok"
    assert "stream_options" not in server.bodies[1]
