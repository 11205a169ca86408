"""The OpenAPI document, and a fuzzer that checks a real gateway against it."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from jsonschema import Draft202012Validator
from openapi_spec_validator import validate

from cortex import fake_node
from cortex.fake_node import FakeNode
from cortex.running_gateway import Cortex, running_cortex
from helexa.core.errors import ApiError
from helexa.core.wire.openai_chat import ChatRequest
from helexa.core.wire.openai_completions import CompletionRequest
from helexa.core.wire.request import WireRequest
from helexa.core.wire.responses_request import CompactRequest, ResponsesRequest
from helexa.core.wire.tokens_and_embeddings import DetokenizeRequest, EmbeddingsRequest, TokenizeRequest
from helexa.cortex.api.openapi import document
from helexa.cortex.app import ROUTES
from nightly import cases

CASES = cases(2, 100)
ROOT = {"Authorization": "Bearer root"}
NEW_KEY = {"account_id": "a", "key_id": "made"}
KEYS = [{"key": "root", "account_id": "root", "role": "admin"}, {"key": "static", "account_id": "static"}]


async def test_openapi_document_is_public_and_valid(cortex: Cortex) -> None:
    served = await cortex.get("/openapi.json")
    assert served == document()
    validate(served)


def test_openapi_document_lists_exactly_the_routes_of_the_gateway() -> None:
    routes = {
        (method.lower(), route.path.replace(":path}", "}"))
        for route in ROUTES
        for method in (route.methods or set()) - {"HEAD"}
    }
    documented = {(method, path) for path, operations in document()["paths"].items() for method in operations}
    assert documented == routes


def test_operation_ids_of_the_openapi_document_are_unique() -> None:
    names = [
        operation["operationId"] for operations in document()["paths"].values() for operation in operations.values()
    ]
    assert len(set(names)) == len(names)


IDENTITY = {"id": "c1", "created": 1, "model": "Org/M"}
RESPONSES: dict[str, Any] = {
    "/v1/completions": {**IDENTITY, "object": "text_completion", "choices": [{"index": 0, "text": "Hello"}]},
    "/v1/responses": {**IDENTITY, "object": "response", "output": []},
    "/v1/embeddings": {"object": "list", "data": [{"index": 0, "embedding": [0.5]}]},
    "/v1/images/generations": {"created": 1, "data": [{"b64_json": "AA=="}]},
    "/v1/responses/compact": {"id": "r", "object": "response.compaction", "output": []},
    "/v1/responses/input_tokens": {"object": "response.input_tokens", "input_tokens": 3},
    "/tokenize": {"count": 3, "max_model_len": 9, "tokens": [1, 2, 3]},
    "/detokenize": {"prompt": "abc"},
    "/tokenizer_info": {"eos_token": "</s>"},
}


NEVER_STREAMED = ("/v1/responses/compact", "/v1/responses/input_tokens", "/tokenize", "/detokenize", "/tokenizer_info")


async def respond(node: FakeNode, request: web.Request) -> web.StreamResponse:
    """Respond in the API format of each path, with a stream if the request is for one."""
    response = RESPONSES.get(request.path)
    streams = request.path not in NEVER_STREAMED and (await request.json()).get("stream") is True
    return await fake_node.respond(node, request) if response is None or streams else web.json_response(response)


def narrowed(served: Any) -> Any:
    """Restrict the document's parameters to known models, nodes and keys, and require the bearer key."""
    for operations in served["paths"].values():
        for operation in operations.values():
            operation["security"] = [{"bearer": []}] if operation["security"] else []
            for parameter in operation.get("parameters", ()):
                known = {"name": ["n2", "n3"], "model": ["Org/M", "no"], "key_id": ["made", "static", "no"]}
                if parameter["name"] in known and (parameter["in"] == "path" or parameter["required"]):
                    parameter["schema"] = {"enum": known[parameter["name"]]}
    for schema in served["components"]["schemas"].values():
        if schema.get("properties", {}).get("model", {}).get("minLength"):
            schema["properties"]["model"] = {"enum": ["Org/M", "small", "no"]}
    unload = served["components"]["schemas"]["ModelUnloadRequest"]  # n1 keeps the model that all other requests need
    unload["properties"]["node"] = {"enum": ["n2", "n3"]}
    unload["required"] = ["model", "node"]
    return served


async def test_fuzzer_finds_no_deviation_from_the_openapi_document(node: FakeNode, tmp_path: Path) -> None:
    settings = {"entitlements": {"require_auth": True, "keys": KEYS}}
    async with FakeNode(name="n2").serving() as second:
        node.speak = respond
        async with running_cortex(node, second, settings=settings, aliases={"small": "Org/M"}) as cortex:
            async with cortex.client.post(f"{cortex.url}/api/keys", json=NEW_KEY, headers=ROOT) as created:
                assert created.status == 201
            document_path = tmp_path / "openapi.json"
            document_path.write_text(json.dumps(narrowed(await cortex.get("/openapi.json"))))
            fuzzer = await asyncio.create_subprocess_exec(
                *(
                    sys.executable,
                    "-c",
                    "from schemathesis.cli import schemathesis; schemathesis()",
                    "run",
                    str(document_path),
                ),
                # The stream of events never ends.
                *("--exclude-path", "/api/events"),
                *("--url", cortex.url, "--header", "Authorization: Bearer root", "--generation-deterministic"),
                *("--max-examples", str(CASES), "--phases", "examples,coverage,fuzzing", "--workers", "1"),
                *(
                    "--exclude-checks",
                    "negative_data_rejection,positive_data_acceptance",
                    "--continue-on-failure",
                    "--warnings",
                    "off",
                    "--no-color",
                ),
                cwd=tmp_path,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
            )
            output, _ = await fuzzer.communicate()
            assert fuzzer.returncode == 0, output.decode()
            assert node.bodies


HI = {"role": "user", "content": "Hi"}
BODIES: list[tuple[str, type[WireRequest], dict[str, Any]]] = [
    ("/v1/chat/completions", ChatRequest, {"messages": [HI]}),
    ("/v1/completions", CompletionRequest, {"prompt": "Hi"}),
    ("/v1/responses", ResponsesRequest, {"input": "Hi"}),
    ("/v1/responses/compact", CompactRequest, {"input": "Hi"}),
    ("/v1/responses/input_tokens", ResponsesRequest, {"input": [HI]}),
    ("/v1/embeddings", EmbeddingsRequest, {"input": ["Hi"]}),
    ("/tokenize", TokenizeRequest, {"prompt": "Hi"}),
    ("/detokenize", DetokenizeRequest, {"tokens": [1]}),
]
WRONG: list[dict[str, Any]] = [
    *({name: []} for name in ("messages", "prompt", "input")),
    *({name: [[]]} for name in ("prompt", "input")),
    {"prompt": ""},
    {"messages": [{"content": "Hi"}]},
    {"tokens": "Hi"},
    {"temperature": 3},
    {"temperature": "0"},
    {"top_p": 0},
    {"stream": "yes"},
    {"n": 17},
    {"max_tokens": -1},
    {"max_output_tokens": 0},
    {"metadata": {"a": 1}},
    {"encoding_format": "hex"},
    {"stop": ["a"] * 17},
]


@pytest.mark.parametrize(("path", "kind", "body"), BODIES)
@pytest.mark.parametrize("wrong", WRONG)
def test_openapi_document_and_gateway_accept_the_same_request_bodies(
    path: str, kind: type[WireRequest], body: dict[str, Any], wrong: dict[str, Any]
) -> None:
    def accepted(fields: dict[str, Any]) -> bool:
        try:
            kind.parse(json.dumps(fields).encode())
        except ApiError as error:
            return error.code != "invalid_request_body"  # other codes concern valid shapes
        return True

    reference = document()["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    schema = {**reference, "components": document()["components"]}
    for fields in ({"model": "m", **body}, {"model": "m", **body, **wrong}):
        assert Draft202012Validator(schema).is_valid(fields) == accepted(fields)
