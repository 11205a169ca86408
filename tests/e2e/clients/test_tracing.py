"""OpenTelemetry traces: from the gateway through the node to the engine's steps."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from clients.otlp_receiver import Receiver, receiving
from clients.stack import MODEL, Stack
from cortex.fake_node import FakeNode
from cortex.running_gateway import running_cortex
from helexa.core import tracing

TOKENS = 8
PROMPT = "Count to ten, slowly."
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    with receiving() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        yield receiver


def test_spans_of_gateway_node_and_engine_steps_form_one_trace(
    receiver: Receiver, smollm2_gguf: Path, tmp_path: Path
) -> None:
    with Stack(smollm2_gguf, tmp_path) as stack, stack.client() as client:
        chat = client.chat.completions.create(
            model="small", max_tokens=TOKENS, temperature=0, messages=[{"role": "user", "content": PROMPT}]
        )
        assert chat.usage is not None
        assert chat.usage.completion_tokens == TOKENS
    (root, at_node) = sorted(receiver.named("POST /v1/chat/completions"), key=lambda span: span.service)
    (forwarded,), (run,) = receiver.named("node n1"), receiver.named("run")
    (queue,), (prefill,), (decode,) = (receiver.named(name) for name in ("queue", "prefill", "decode"))
    steps = receiver.named("engine step")
    assert (root.service, at_node.service) == ("cortex", "neuron")
    assert {span.trace for span in receiver.spans} == {root.trace}
    assert root.parent == b""
    assert (forwarded.parent, at_node.parent, run.parent) == (root.id, forwarded.id, at_node.id)
    assert {span.parent for span in (queue, prefill, decode)} == {run.id}
    read = [step.attributes["tokens"] for step in steps if step.parent == prefill.id]
    written = [step.attributes["tokens"] for step in steps if step.parent == decode.id]
    assert (sum(map(int, read)), written) == (chat.usage.prompt_tokens, [1] * (TOKENS - 1))
    assert {step.attributes["batch"] for step in steps} == {1}
    assert root.attributes["gen_ai.usage.output_tokens"] == run.attributes["gen_ai.usage.output_tokens"] == TOKENS
    assert (root.attributes["http.response.status_code"], root.attributes["gen_ai.request.model"]) == (200, MODEL)
    for inner, outer in ((at_node, root), (run, at_node), (decode, run)):
        # An inner span may end after the outer one: the answer is sent before its handler has ended.
        assert outer.begun - 5_000_000 <= inner.begun <= outer.ended
    assert PROMPT.encode() not in receiver.data


@pytest.mark.parametrize("trusted", [True, False])
async def test_traceparent_header_is_used_only_from_a_trusted_proxy(
    receiver: Receiver, node: FakeNode, trusted: bool
) -> None:
    tracing.configure("cortex")
    try:
        proxies = ["127.0.0.1"] if trusted else []
        async with running_cortex(node, settings={"gateway": {"trusted_proxies": proxies}}) as cortex:
            headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "a=b"}
            body = {"model": "Org/M", "messages": [{"role": "user", "content": "Hi"}]}
            async with cortex.client.post(f"{cortex.url}/v1/chat/completions", json=body, headers=headers) as response:
                assert response.status == 200
    finally:
        tracing.shut_down()
    (root,), (forwarded,) = receiver.named("POST /v1/chat/completions"), receiver.named("node n1")
    assert (root.trace.hex() == TRACE, root.parent.hex() == PARENT) == (trusted, trusted)
    assert node.headers[-1]["traceparent"].startswith(f"00-{root.trace.hex()}-{forwarded.id.hex()}-")
    assert node.headers[-1].get("tracestate") == ("a=b" if trusted else None)


async def test_trace_of_a_failed_request_has_its_error_code(receiver: Receiver, node: FakeNode) -> None:
    tracing.configure("cortex")
    try:
        async with running_cortex(node) as cortex:
            assert (await cortex.ask("unknown"))[0] == 404
    finally:
        tracing.shut_down()
    (span,) = receiver.spans
    assert (span.attributes["http.response.status_code"], span.attributes["error.type"]) == (404, "model_not_found")


def test_gateway_without_the_tracing_packages_names_the_pip_extra_otel_in_one_line(
    tmp_path: Path, receiver: Receiver
) -> None:
    (tmp_path / "cortex.toml").write_text("")
    script = "import sys\nsys.modules['opentelemetry.sdk'] = None\nfrom helexa.cortex.cli import main\nmain()"
    command = [sys.executable, "-c", script, "serve", "-c", str(tmp_path / "cortex.toml")]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode != 0
    assert done.stderr.count("\n") == 1
    assert "pip install 'helexa[otel]'" in done.stderr
