"""Requests and loads while the node has no free file descriptor."""

import json
import logging
from pathlib import Path

import pytest

from descriptors import no_descriptors
from helexa.neuron.text import chat_template
from neuron.fake_models import make_model
from neuron.running_node import running
from neuron.scripted_engine import AGENT_TEMPLATE, answer
from neuron.scripted_node import CHAT, serve

CHAT_PATH = "/v1/chat/completions"
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "integer"}}}


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the log lines above INFO. Assert that none has a traceback."""
    records = [record for record in caplog.records if record.levelno > logging.INFO]
    assert all(record.exc_info is None for record in records)
    return [record.getMessage() for record in records]


@pytest.mark.parametrize("request_fields", [{}, {"response_format": SCHEMA}], ids=["template", "grammar"])
async def test_request_that_needs_a_new_process_is_503_if_file_descriptors_run_out(
    caplog: pytest.LogCaptureFixture, request_fields: dict[str, object]
) -> None:
    chat_template.PROCESSES.close()  # processes of other tests
    async with serve(answer("x"), AGENT_TEMPLATE) as node:
        if request_fields:
            assert (await node.post(CHAT_PATH, CHAT))[0] == 200  # starts the template's process
        await node.http.get(f"{node.url}/v1/models")
        with no_descriptors():
            status, code, _ = await node.error(CHAT_PATH, CHAT | request_fields)
        assert (status, code) == (503, "rate_limit_exceeded")
        assert len(errors(caplog)) == 1
        assert (await node.post(CHAT_PATH, CHAT | request_fields))[0] == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_load_is_503_if_file_descriptors_run_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    model = make_model(tmp_path)
    body = {"model_id": "org/tiny", "source": f"file:{model}", "stream": stream}
    async with running({}) as node:
        await node.get("/models")
        with no_descriptors():
            async with node.session.post(f"{node.url}/models/load", json=body) as response:
                text = await response.text()
        assert "no file descriptors left" in text
        assert json.loads(text)["error"]["code"] == "rate_limit_exceeded"
        assert response.status == 503
        errors(caplog)
        assert (await node.load(model))[0] == 200
