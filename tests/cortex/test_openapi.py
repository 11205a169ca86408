"""The document of the API, and a fuzzer that holds a real gateway to it."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from aiohttp import web
from openapi_spec_validator import validate

from cortex import fake_node
from cortex.fake_node import FakeNode
from cortex.running import Cortex, running_cortex
from helexa.cortex.app import ROUTES
from helexa.cortex.openapi import document

CASES = 12
ROOT = {"Authorization": "Bearer root"}
MADE = {"account_id": "a", "key_id": "made"}
KEYS = [{"key": "root", "account_id": "root", "role": "admin"}, {"key": "static", "account_id": "static"}]


async def test_it_is_public_and_valid(cortex: Cortex) -> None:
    served = await cortex.get("/openapi.json")
    assert served == document()
    validate(served)


def test_every_route_is_in_it_and_nothing_else() -> None:
    routes = {
        (method.lower(), route.path.replace(":path}", "}"))
        for route in ROUTES
        for method in (route.methods or set()) - {"HEAD"}
    }
    documented = {(method, path) for path, operations in document()["paths"].items() for method in operations}
    assert documented == routes


def test_every_operation_has_a_name_of_its_own() -> None:
    names = [one["operationId"] for operations in document()["paths"].values() for one in operations.values()]
    assert len(set(names)) == len(names)


IDENTITY = {"id": "c1", "created": 1, "model": "Org/M"}
ANSWERS: dict[str, Any] = {
    "/v1/completions": {**IDENTITY, "object": "text_completion", "choices": [{"index": 0, "text": "Hello"}]},
    "/v1/responses": {**IDENTITY, "object": "response", "output": []},
    "/v1/embeddings": {"object": "list", "data": [{"index": 0, "embedding": [0.5]}]},
    "/v1/images/generations": {"created": 1, "data": [{"b64_json": "AA=="}]},
    "/tokenize": {"count": 3, "max_model_len": 9, "tokens": [1, 2, 3]},
}


async def speak(node: FakeNode, request: web.Request) -> web.StreamResponse:
    """An answer in the dialect of each path; events where the gateway would take them for an answer."""
    answer = ANSWERS.get(request.path)
    if answer is None or (await request.json()).get("stream") is True:
        return await fake_node.answer(node, request)
    return web.json_response(answer)


def narrowed(served: Any) -> Any:
    """The document for somebody who knows which models, nodes and keys there are, at a gateway that requires keys."""
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
    return served


async def test_a_fuzzer_finds_nothing_else(node: FakeNode, tmp_path: Path) -> None:
    settings = {"entitlements": {"require_auth": True, "keys": KEYS}}
    async with FakeNode(name="n2").serving() as second:
        node.speak = speak
        async with running_cortex(node, second, settings=settings, aliases={"small": "Org/M"}) as cortex:
            async with cortex.client.post(f"{cortex.url}/api/keys", json=MADE, headers=ROOT) as made:
                assert made.status == 201
            found = tmp_path / "openapi.json"
            found.write_text(json.dumps(narrowed(await cortex.get("/openapi.json"))))
            fuzzer = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", "from schemathesis.cli import schemathesis; schemathesis()", "run", str(found)),
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
            said, _ = await fuzzer.communicate()
            assert fuzzer.returncode == 0, said.decode()
            assert node.bodies
