"""Fake nodes that use every token the forwarded request allows, and random requests for them."""

import asyncio
import json
import random
import sqlite3
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from cortex.fake_node import DONE, FakeNode, begin, chunk, event
from cortex.running_gateway import Cortex, eventually, running_cortex
from helexa.core.errors import ApiError
from helexa.core.wire.openai_chat import ChatRequest
from helexa.core.wire.openai_completions import CompletionRequest
from helexa.core.wire.responses_request import ResponsesRequest
from helexa.core.wire.tokens_and_embeddings import EmbeddingsRequest

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES, EMBEDDINGS = "/v1/responses", "/v1/messages", "/v1/embeddings"
LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "n_predict", "num_predict", "max_new_tokens")
CONTEXTS = {"Own/Small": 1024, "Own/Large": 131_072, "Own/Cold": None, "Box/Known": 4096, "Box/Unknown": None}
TEMPLATE_TOKENS = 300  # tokens that a chat template adds
ENDLESS = 100_000  # output tokens of a request without any limit
CAPS = (40, 600, 2_000, 2_000, 9_000, 50_000, 50_000, 200_000)
KEYS = [{"key": f"k{i}", "account_id": "a", "key_id": f"k{i}", "hard_cap": cap} for i, cap in enumerate(CAPS)]


class Spender(FakeNode):
    """A node that counts one prompt token per byte and generates as many tokens as the request allows.

    Attributes:
        own: True if the node parses the body as helexa's nodes do. False if it uses the largest limit in the body,
            under any spelling, as a third-party backend might.
        used: tokens by request id.
        hangs: ids of requests whose response never ends.
    """

    def __init__(self, name: str, *, own: bool) -> None:
        super().__init__(name)
        self.own, self.used, self.hangs = own, dict[str, int](), set[str]()
        self.speak = spend
        self.holds_context(*(model for model in CONTEXTS if model.startswith("Own") == own))

    def holds_context(self, *models: str) -> None:
        for model in models:
            context = CONTEXTS[model]
            self.holds(model, **({"limit": {"context": context}} if context else {}))
            self.models[-1]["max_model_len"] = context

    async def _list(self, request: web.Request) -> web.Response:
        data = [{"id": model["id"], "max_model_len": model["max_model_len"]} for model in self.models]
        return await self._poll(request, {"object": "list", "data": data})


async def spend(node: FakeNode, request: web.Request) -> web.StreamResponse:
    assert isinstance(node, Spender)
    body = node.bodies[-1] if request.path != "/tokenize" else await request.read()
    if request.path == "/tokenize":
        prompt = prompt_tokens(json.loads(body))
        return web.json_response({"count": prompt, "max_model_len": 1, "tokens": []})
    fields = json.loads(body)
    try:
        prompt, count, limit = own_use(request.path, body) if node.own else foreign_use(request.path, body)
    except ApiError as error:
        return web.json_response(error.envelope(), status=error.status)
    context = CONTEXTS[fields["model"]]
    if context is not None:
        if prompt >= context:
            return web.json_response({"error": {"message": "too long", "type": "x", "code": "y"}}, status=400)
        limit = min(limit, context - prompt)
    output = count * limit
    request_id = request.headers["x-request-id"]
    node.used[request_id] = prompt + output
    usage = usage_of(request.path, prompt, output)
    if usage_id := request.headers.get("x-helexa-usage-id"):
        node.usages[usage_id] = {"prompt_tokens": prompt, "completion_tokens": output, "cached_tokens": 0}
    hangs = fields.get("user") == "hang"
    if not fields.get("stream") or request.path == EMBEDDINGS:
        if hangs:
            await node.go_on.wait()
        choice = {"index": 0, "message": {"role": "assistant", "content": "x"}, "finish_reason": "stop"}
        return web.json_response({"choices": [choice], "usage": usage})
    if request.path == RESPONSES:
        data = json.dumps({"type": "response.completed", "response": {"usage": usage}}).encode()
        delta = b'event: response.output_text.delta\ndata: {"delta":"Hi"}\n\n'
        frames = [delta, b"event: response.completed\ndata: " + data + b"\n\n"]
    else:
        include_usage = (fields.get("stream_options") or {}).get("include_usage") is True
        include_usage = include_usage or (node.own and request.headers.get("x-helexa-include-usage") == "1")
        finish = event(choices=[{"index": 0, "delta": {}, "finish_reason": "stop"}])
        frames = [chunk("a"), finish, *([event(usage=usage)] if include_usage else []), DONE]
    response = await begin(request, *frames[: 1 if hangs else None])
    if hangs:
        await node.go_on.wait()
    return response


def usage_of(path: str, prompt: int, output: int) -> dict[str, int]:
    if path == RESPONSES:
        return {"input_tokens": prompt, "output_tokens": output}
    return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}


def prompt_tokens(fields: dict[str, Any]) -> int:
    """Return one token per byte of text, plus the chat template's tokens."""
    if isinstance(prompt := fields.get("prompt"), list):
        return sum(len(item.encode()) if isinstance(item, str) else 1 for item in prompt)
    texts = [fields.get("prompt") or "", fields.get("instructions") or "", *strings(fields.get("input") or [])]
    texts += [json.dumps(fields["tools"], separators=(",", ":"), ensure_ascii=False)] if fields.get("tools") else []
    texts += [text for message in fields.get("messages") or [] for text in strings(message.get("content"))]
    turns = len(fields.get("messages") or []) + (len(fields["input"]) if isinstance(fields.get("input"), list) else 0)
    return sum(len(text.encode()) for text in texts) + 5 * turns + TEMPLATE_TOKENS


def strings(content: Any) -> Iterator[str]:
    if isinstance(content, str):
        yield content
    elif isinstance(content, dict):
        yield from (text for name in ("text", "content") for text in strings(content.get(name)))
    elif isinstance(content, list):
        yield from (text for item in content for text in strings(item))


def own_use(path: str, body: bytes) -> tuple[int, int, int]:
    """Return prompt tokens, number of choices and output limit per choice, as a helexa node reads them."""
    prompt = prompt_tokens(json.loads(body))
    if path == EMBEDDINGS:
        EmbeddingsRequest.parse(body)
        return prompt - TEMPLATE_TOKENS, 0, 0
    if path == RESPONSES:
        responses_request = ResponsesRequest.parse(body)
        return prompt, 1, responses_request.chat().output_limit or 8192
    request = (ChatRequest if path == CHAT else CompletionRequest).parse(body)
    return prompt, request.n or 1, request.output_limit or 8192


def foreign_use(path: str, body: bytes) -> tuple[int, int, int]:
    """Return what `own_use` returns, for a backend that uses the largest limit under any name and case."""
    fields = json.loads(body)
    if path == EMBEDDINGS:
        return prompt_tokens(fields) - TEMPLATE_TOKENS, 0, 0
    pairs: list[tuple[str, Any]] = json.loads(body, object_pairs_hook=list)
    limits = [int(float(value)) for name, value in pairs if name.casefold() in LIMITS and value is not None]
    return prompt_tokens(fields), choice_count(fields), max(limits) if limits else ENDLESS


def choice_count(fields: dict[str, Any]) -> int:
    prompt = fields.get("prompt")
    prompts = len(prompt) if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else 1
    return prompts * int(max(fields.get("n") or 1, fields.get("best_of") or 1))


def random_request(dice: random.Random) -> tuple[str, bytes, bool]:
    """Return a path, a body and whether the client disconnects.

    Some numbers in the body are invalid, and some fields occur twice.
    """
    path = dice.choice((CHAT, CHAT, COMPLETIONS, RESPONSES, MESSAGES, EMBEDDINGS))
    text = dice.choice(("Hi", "7" * dice.randint(1, 900), "🦊" * dice.randint(1, 300), "word " * dice.randint(1, 2000)))
    fields: dict[str, Any] = {"model": dice.choice(list(CONTEXTS)), "stream": dice.random() < 0.5}
    match path:
        case "/v1/completions":
            fields["prompt"] = dice.choice((text, [text], [text, "b"], [5] * dice.randint(1, 500)))
        case "/v1/responses":
            fields["input"] = dice.choice((text, [{"role": "user", "content": text}]))
        case "/v1/embeddings":
            fields["input"] = dice.choice((text, [text, "b"]))
        case _:
            fields["messages"] = [{"role": "user", "content": text}] * dice.randint(1, 3)
    if path == MESSAGES or dice.random() < 0.6:
        fields["max_tokens"] = dice.choice((1, 10, 200, 2000, 100_000, 200, 10.0, "10", True, -1, None))
    if path != MESSAGES:
        for name, odds in (("max_completion_tokens", 0.3), ("max_output_tokens", 0.3), ("n_predict", 0.1)):
            if dice.random() < odds:
                fields[name] = dice.choice((1, 50, 3000, 100_000, None, 1.0))
        if dice.random() < 0.3:
            fields["n"] = dice.choice((1, 2, 4, 10, 10.0, "10", 1000, None))
        if dice.random() < 0.1:
            fields["best_of"] = dice.choice((1, 3, 5))
    hang = dice.random() < 0.2
    if hang and path != MESSAGES:
        fields["user"] = "hang"
    elif hang:
        fields["metadata"] = {"user_id": "hang"}
    body = json.dumps(fields, ensure_ascii=dice.random() < 0.5)
    if path != MESSAGES and dice.random() < 0.2:  # a duplicate field, or a field in another spelling
        name = dice.choice(("max_tokens", "Max_Tokens", "MAX_COMPLETION_TOKENS", "n", "N", "max\\u005ftokens"))
        body = body[:-1] + f', "{name}": {dice.choice((1, 2, 100, 5000, 100_000))}}}'
        body = dice.choice((body, "{" + f'"{name}": 100000, ' + body[1:]))
    return path, body.encode(), hang


@dataclass
class Attack:
    """A gateway with capped keys in front of one helexa node and one third-party backend.

    Attributes:
        statuses: number of requests by HTTP status; 0 means that the client disconnected.
        entries_checked: number of ledger rows at the last `check`.
        charged: tokens charged in these rows.
    """

    cortex: Cortex
    nodes: list[Spender]
    database: Path
    statuses: dict[int, int] = field(default_factory=dict[int, int])
    entries_checked: int = 0
    charged: int = 0

    async def ask(self, key: str, path: str, body: bytes, *, hang: bool = False, request_id: str = "") -> int:
        """Send a request and return its HTTP status, 0 if the client disconnected, -1 on a connection error."""
        headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
        headers |= {"x-request-id": request_id} if request_id else {}
        timeout_secs = 0.15 if hang else 60.0
        try:
            async with asyncio.timeout(timeout_secs):
                async with self.cortex.client.post(self.cortex.url + path, data=body, headers=headers) as response:
                    await response.read()
                    status = response.status
        except TimeoutError:
            assert hang
            status = 0
        except aiohttp.ClientError:
            status = -1
        self.statuses[status] = self.statuses.get(status, 0) + 1
        return status

    async def entries(self) -> list[sqlite3.Row]:
        """Return the ledger's rows after every reservation is settled."""
        ledger = self.cortex.gateway.ledger
        await eventually(lambda: not ledger.open)
        await ledger.flush()
        with closing(sqlite3.connect(self.database)) as connection:
            connection.row_factory = sqlite3.Row
            return connection.execute("SELECT * FROM entries ORDER BY seq").fetchall()

    async def check(self) -> None:
        """Assert that every ledger row matches the tokens used, and that no key exceeds its cap."""
        used = {name: tokens for node in self.nodes for name, tokens in node.used.items()}
        third_party = self.nodes[1].used.keys()
        spent = dict.fromkeys((key["key_id"] for key in KEYS), 0)
        rows = await self.entries()
        for row in rows:
            spent[row["key_id"]] += row["charged"]
            reserved, charged, name = row["reserved"], row["charged"], row["request_id"]
            assert charged <= reserved, dict(row)
            assert used.get(name, 0) <= reserved, (dict(row), used[name])
            if row["estimated"]:
                assert name in third_party
            else:
                assert charged == used.get(name, 0), (dict(row), used.get(name))
        for key in KEYS:
            assert spent[key["key_id"]] <= key["hard_cap"], key
        self.entries_checked, self.charged = len(rows), sum(spent.values())


@asynccontextmanager
async def attacking(folder: Path) -> AsyncIterator[Attack]:
    own, box = Spender("own", own=True), Spender("box", own=False)
    database = folder / "cortex.db"
    async with own.serving(), box.serving():
        settings = {
            "neurons": [
                {"name": "own", "endpoint": own.url},
                {"name": "box", "endpoint": box.url, "kind": "openai"},
            ],
            "entitlements": {"require_auth": True, "keys": KEYS},
            "ledger": {"url": f"sqlite:{database}"},
        }
        async with running_cortex(own, box, settings=settings) as cortex:
            attack = Attack(cortex, [own, box], database)
            await eventually(lambda: all(cortex.gateway.fleet.view().knows(model) for model in CONTEXTS))
            yield attack


async def random_attack(folder: Path, seed: int, requests: int, parallel: int = 8) -> Attack:
    """Send random requests in batches of `parallel`, and check the ledger after every batch."""
    dice = random.Random(seed)
    async with attacking(folder) as attack:
        for _ in range(0, requests, parallel):
            batch = [(random_request(dice), dice.choice(KEYS)["key"]) for _ in range(parallel)]
            await asyncio.gather(*(attack.ask(key, path, body, hang=hang) for (path, body, hang), key in batch))
            await attack.check()
        return attack
