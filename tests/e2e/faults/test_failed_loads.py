"""Failed loads: the node reports the model and the reason in one line, and keeps serving other models."""

from pathlib import Path
from typing import Any

import pytest

from clients.stack import MODEL, Stack, get, post
from faults import bad_models
from faults.conftest import AWAY, GONE, HALF
from neuron.fake_hub import FakeHub, Fault

HI = [{"role": "user", "content": "Hi"}]


def load(stack: Stack, source: object, model_id: str = "org/broken") -> tuple[int, Any]:
    status, _, body = post(f"{stack.node_url}/models/load", {"model_id": model_id, "source": str(source)})
    return status, body["error"]


def complete(stack: Stack, model: str = MODEL) -> tuple[int, dict[str, str], Any]:
    return post(f"{stack.url}/v1/chat/completions", {"model": model, "messages": HI, "max_tokens": 1})


@pytest.fixture(autouse=True)
def still_serves(stack: Stack):
    yield
    assert [model["id"] for model in get(f"{stack.node_url}/models")] == [MODEL]
    assert complete(stack)[0] == 200


def test_load_of_a_truncated_model_file_is_rejected(stack: Stack, half: Path):
    status, error = load(stack, half)
    assert status == 400
    assert error.startswith("half.gguf: ")
    assert "\n" not in error


@pytest.mark.parametrize("tokenizer", ["llama", "gpt2"])
def test_unsupported_architecture_is_rejected(stack: Stack, tmp_path: Path, tokenizer: str):
    status, error = load(stack, bad_models.mamba_model(tmp_path / "model.gguf", tokenizer))
    assert status == 400
    assert "architecture 'mamba'" in error
    assert "\n" not in error


@pytest.mark.parametrize("content", [b"", b"GGUF", bytes(range(256)) * 64], ids=["empty", "magic", "noise"])
def test_load_of_a_file_that_contains_no_model_is_rejected(stack: Stack, tmp_path: Path, content: bytes):
    path = tmp_path / "noise.gguf"
    path.write_bytes(content)
    status, error = load(stack, path)
    assert status == 400
    assert "noise.gguf" in error
    assert "\n" not in error


def test_load_of_a_missing_model_file_is_rejected(stack: Stack, tmp_path: Path):
    status, error = load(stack, tmp_path / "missing.gguf")
    assert (status, error["kind"], error["model_id"]) == (422, "invalid_source", f"file:{tmp_path}/missing.gguf")
    assert "does not exist" in error["message"]


def test_load_from_an_unreachable_hub_fails_with_an_error_that_names_the_url(stack: Stack):
    status, error = load(stack, f"away:{AWAY}", model_id=AWAY)
    assert (status, error["kind"], error["model_id"]) == (422, "repo_fetch_failed", AWAY)
    assert "could not be fetched: http://127.0.0.1:" in error["message"]
    assert "\n" not in error["message"]


@pytest.mark.parametrize(
    ("file", "fault", "kind", "message"),
    [
        ("small-Q8_0.gguf", Fault(body=b"?" * 25600), "invalid_source", "the received bytes were discarded"),
        ("small-Q8_0.gguf", Fault(status=404), "repo_refused", "does not exist at http://127.0.0.1:"),
        ("list", Fault(status=401), "repo_refused", "is private or does not exist at http://127.0.0.1:"),
        ("list", Fault(body=b"?"), "repo_refused", "does not speak the protocol of the Hugging Face Hub"),
    ],
    ids=["wrong-hash", "404", "401", "no-hub"],
)
def test_hub_error_or_damaged_download_fails_the_load_with_a_one_line_error(
    stack: Stack, hub: FakeHub, file: str, fault: Fault, kind: str, message: str
):
    hub.inject(file, fault)
    status, error = load(stack, "hub:org/small")
    assert (status, error["kind"], error["model_id"]) == (422, kind, "org/small")
    assert message in error["message"]
    assert "\n" not in error["message"]


def test_missing_quantization_is_rejected_without_a_download(stack: Stack, hub: FakeHub):
    downloads = len(hub.downloads())
    wanted = {"model_id": "org/broken", "source": "hub:org/small", "quant": "q8_1"}
    status, _, body = post(f"{stack.node_url}/models/load", wanted)
    assert (status, body["error"]["kind"], body["error"]["nearest"]) == (422, "quant_not_found", "Q8_0")
    assert len(hub.downloads()) == downloads


def test_gateway_forwards_the_reason_of_a_failed_load_to_the_client(stack: Stack):
    status, headers, body = complete(stack, AWAY)
    assert (status, body["error"]["code"]) == (503, "service_unavailable")
    assert "could not be fetched" in body["error"]["message"]
    assert "retry-after" in headers
    status, headers, body = complete(stack, HALF)
    assert (status, body["error"]["code"]) == (503, "service_unavailable")
    assert "half.gguf: " in body["error"]["message"]
    assert "retry-after" not in headers, "a retry cannot repair the file"
    status, headers, body = complete(stack, GONE)
    assert (status, body["error"]["code"]) == (503, "service_unavailable")
    assert "does not exist at http://127.0.0.1:" in body["error"]["message"]
    assert "retry-after" not in headers, "a retry cannot find the model"
