"""Send requests that must call random tools through every API, and check that the tool calls are valid.

    python perf/attack/forced_calls.py MODEL[=FORMAT] ... [--tools 500] [--seed 0] [--streams 4] [--every-api]

MODEL is a model's file or folder. If the folder contains only a tokenizer, the script creates a model with random
weights. FORMAT is the tool-call format (`hermes`, `llama3_json`, `mistral`, ...). The default is the model's own
format. If the chat template of a GGUF file does not support tools, add another template first: `gguf-new-metadata IN
OUT --chat-template TEXT`.

A node behind a gateway loads the models one after the other. There are six routes: chat completions and Responses on
the node, and Messages on the gateway, each with and without streaming. The script tests each random tool on one route,
or on all routes with `--every-api`. Speculation is on, as by default.

A response must be a valid tool call, or end at the length limit. For each model and route, the script prints a JSON
line with the numbers of valid responses, of responses that ended at the length limit, and of wrong responses. It also
prints a line with the reason for each wrong response. The exit status is 1 if a response is wrong.
"""

import argparse
import asyncio
import itertools
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

sys.path.append(str(Path(__file__).parents[1]))
from support.gateways import cortex_config
from support.output import print_line, run
from support.random_tools import CallResult, Task, problem, random_task, write_random_model
from support.servers import client_session, free_port, get, require_alive, server

ROUTES = [*itertools.product(("chat", "responses", "messages"), (False, True))]
PROMPT = "Use a tool."


@dataclass(frozen=True)
class Stack:
    """A running node, and a gateway that routes requests to it.

    Attributes:
        session: HTTP session for requests to both servers.
        node, gateway: base URLs of the node and of the gateway.
    """

    session: aiohttp.ClientSession
    node: str
    gateway: str

    async def load(self, model: str, path: Path, tool_format: str) -> None:
        """Load a model on the node, and wait until the gateway lists it as loaded."""
        body = {"model_id": model, "source": f"file:{path}"}
        body |= {"tool_parser": tool_format} if tool_format else {}
        async with self.session.post(f"{self.node}/models/load", json=body) as response:
            if response.status != 200:
                raise SystemExit(f"{path} cannot be loaded: {await response.text()}")
        async with asyncio.timeout(60):
            while True:
                fleet = await get(self.session, f"{self.gateway}/api/nodes") or {"nodes": []}
                infos = [info for node in fleet["nodes"] for info in node["models"]]
                if any(info["id"] == model and info["status"] == "loaded" for info in infos):
                    return
                await asyncio.sleep(0.1)

    async def unload(self, model: str) -> None:
        async with self.session.post(f"{self.node}/models/unload", json={"model_id": model}) as response:
            response.raise_for_status()

    async def ask(self, model: str, task: Task, api: str, stream: bool, max_tokens: int) -> CallResult:
        """Send a request with tools to the model through one API, and return the tool calls of the response.

        Args:
            model: id of the model.
            task: the tools to offer, and the tool that the response must call.
            api: `chat`, `responses` or `messages`.
            stream: whether to request a streamed response.
            max_tokens: maximum number of tokens of the response.
        """
        base = self.gateway if api == "messages" else self.node
        path, body = request_of(task, api, max_tokens)
        body |= {"model": model, "stream": stream, "temperature": 1.0}
        async with self.session.post(base + path, json=body) as response:
            if response.status != 200:
                return CallResult(error=f"HTTP {response.status}: {(await response.text())[:300]}")
            if not stream:
                return complete_result(api, await response.json())
            lines = (await response.text()).splitlines()
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        return streamed_result(api, events)


@asynccontextmanager
async def stack() -> AsyncIterator[Stack]:
    """Run a node without models and a gateway during the `with` block."""
    ports = free_port(), free_port()
    node, gateway = (f"http://127.0.0.1:{port}" for port in ports)
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "neuron.toml"
        config.write_text(
            f'host = "127.0.0.1"\nport = {ports[0]}\ndefault_models = []\n[harness.torch]\nkv_cache_mb = 128\n'
        )
        cortex = cortex_config(Path(folder), ports[1], node, "")
        with server("helexa.neuron", "--config", str(config)) as process:
            async with client_session() as session:
                while await get(session, f"{node}/health") is None:
                    require_alive(process)
                    await asyncio.sleep(0.05)
                with server("helexa.cortex", "serve", "-c", str(cortex)):
                    yield Stack(session, node, gateway)


def request_of(task: Task, api: str, max_tokens: int) -> tuple[str, dict[str, Any]]:
    """Return the URL path and the body of the request with the tools of `task`, in the format of `api`."""
    messages = [{"role": "user", "content": PROMPT}]
    if api == "messages":
        offered = [{"name": name, "input_schema": schema} for name, schema in task.tools.items()]
        choice = {"type": "tool", "name": task.forced} if task.forced else {"type": "any"}
        return "/v1/messages", {
            "messages": messages,
            "max_tokens": max_tokens,
            "tools": offered,
            "tool_choice": choice,
        }
    functions = [{"name": name, "parameters": schema} for name, schema in task.tools.items()]
    if api == "responses":
        tools: list[dict[str, Any]] = [{"type": "function", "strict": False, **function} for function in functions]
        chosen: Any = {"type": "function", "name": task.forced} if task.forced else "required"
        return "/v1/responses", {
            "input": PROMPT,
            "max_output_tokens": max_tokens,
            "tools": tools,
            "tool_choice": chosen,
            "store": False,
        }
    tools = [{"type": "function", "function": function} for function in functions]
    chosen = {"type": "function", "function": {"name": task.forced}} if task.forced else "required"
    return "/v1/chat/completions", {
        "messages": messages,
        "max_tokens": max_tokens,
        "tools": tools,
        "tool_choice": chosen,
    }


def complete_result(api: str, response: dict[str, Any]) -> CallResult:
    """Return the tool calls of a response that was not streamed."""
    if api == "chat":
        (choice,) = response["choices"]
        functions = [call["function"] for call in choice["message"].get("tool_calls") or []]
        calls = [(function["name"], function["arguments"]) for function in functions]
        return _ended(calls, choice["finish_reason"], "tool_calls", "length")
    if api == "responses":
        calls = [(item["name"], item["arguments"]) for item in response["output"] if item["type"] == "function_call"]
        return _ended(calls, response["status"], "completed", "incomplete")
    blocks = [block for block in response["content"] if block["type"] == "tool_use"]
    calls = [(block["name"], json.dumps(block["input"])) for block in blocks]
    return _ended(calls, response["stop_reason"], "tool_use", "max_tokens")


def streamed_result(api: str, events: Sequence[dict[str, Any]]) -> CallResult:
    """Return the tool calls of a streamed response."""
    names: dict[int, str] = {}
    pieces: dict[int, list[str]] = {}
    reason = ""
    for event in events:
        if event.get("error"):
            return CallResult(error=f"error in the stream: {json.dumps(event['error'])[:300]}")
        if api == "chat":
            for choice in event["choices"]:
                for call in choice["delta"].get("tool_calls") or []:
                    names.setdefault(call["index"], call["function"].get("name") or "")
                    pieces.setdefault(call["index"], []).append(call["function"].get("arguments") or "")
                reason = choice["finish_reason"] or reason
        elif api == "responses":
            index = event.get("output_index", 0)
            if event["type"] == "response.output_item.added" and event["item"]["type"] == "function_call":
                names[index] = event["item"]["name"]
                pieces[index] = []
            elif event["type"] == "response.function_call_arguments.delta":
                pieces[index].append(event["delta"])
            elif event["type"] in ("response.completed", "response.incomplete", "response.failed"):
                reason = event["response"]["status"]
        elif event["type"] == "content_block_start" and event["content_block"]["type"] == "tool_use":
            names[event["index"]] = event["content_block"]["name"]
            pieces[event["index"]] = []
        elif event["type"] == "content_block_delta" and event["delta"]["type"] == "input_json_delta":
            pieces[event["index"]].append(event["delta"]["partial_json"])
        elif event["type"] == "message_delta":
            reason = event["delta"]["stop_reason"]
    calls = [(name, "".join(pieces[index]) or "{}") for index, name in names.items()]
    good, cut = {"chat": ("tool_calls", "length"), "responses": ("completed", "incomplete")}.get(
        api, ("tool_use", "max_tokens")
    )
    return _ended(calls, reason, good, cut)


def _ended(calls: Sequence[tuple[str, str]], reason: str, good: str, cut: str) -> CallResult:
    if reason not in (good, cut):
        return CallResult(calls, error=f"the answer ended with {reason!r}: {calls}")
    return CallResult(calls, cut=reason == cut)


async def attack(
    stack: Stack, model: str, tasks: Sequence[Task], *, every_api: bool, streams: int, max_tokens: int
) -> Counter[str]:
    """Send a request for every task. Print a line for each wrong response, and at the end a line for each route.

    Returns:
        Numbers of valid responses, of responses that ended at the length limit (cut), and of wrong responses.
    """
    counts: dict[tuple[str, bool], Counter[str]] = {route: Counter() for route in ROUTES}
    turn = asyncio.Semaphore(streams)

    async def run_task(task: Task, api: str, stream: bool) -> None:
        async with turn:
            result = await stack.ask(model, task, api, stream, max_tokens)
        if reason := problem(task, result):
            print_line(model=model, task=task.number, api=api, stream=stream, wrong=reason)
        counts[api, stream]["wrong" if reason else "cut" if result.cut else "valid"] += 1
        counts[api, stream]["calls"] += len(result.calls)

    chosen = [(task, ROUTES if every_api else [ROUTES[task.number % len(ROUTES)]]) for task in tasks]
    await asyncio.gather(*(run_task(task, *route) for task, routes in chosen for route in routes))
    for (api, stream), count in counts.items():
        print_line(
            model=model, api=api, stream=stream, **{name: count[name] for name in ("valid", "cut", "wrong", "calls")}
        )
    return sum(counts.values(), Counter())


def model_at(path: Path, folder: Path) -> Path:
    """Return the path of a model. If `path` has only a tokenizer, write a model with random weights to `folder`."""
    if path.is_dir() and not (path / "config.json").exists():
        return write_random_model(path, folder)
    return path.absolute()


async def measure(arguments: argparse.Namespace) -> None:
    tasks = [
        random_task(number, arguments.seed) for number in range(arguments.first, arguments.first + arguments.tools)
    ]
    total: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        async with stack() as running:
            for number, text in enumerate(arguments.models):
                name, _, tool_format = text.partition("=")
                path = model_at(Path(name), Path(folder) / str(number))
                model = f"attack/{number}-{Path(name).stem[:40]}-{tool_format or 'own'}"
                await running.load(model, path, tool_format)
                begun = time.perf_counter()
                count = await attack(
                    running,
                    model,
                    tasks,
                    every_api=arguments.every_api,
                    streams=arguments.streams,
                    max_tokens=arguments.max_tokens,
                )
                print_line(model=model, seconds=time.perf_counter() - begun, **count)
                total += count
                await running.unload(model)
    print_line(total=True, **total)
    if total["wrong"]:
        raise SystemExit(1)


def main() -> None:
    command = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    command.add_argument("models", nargs="+")
    command.add_argument("--tools", type=int, default=500)
    command.add_argument("--first", type=int, default=0, help="number of the first tool")
    command.add_argument("--seed", type=int, default=0)
    command.add_argument("--streams", type=int, default=4, help="requests at a time; the engine drafts for up to 4")
    command.add_argument("--max-tokens", type=int, default=200)
    command.add_argument("--every-api", action="store_true")
    run(measure(command.parse_args()))


if __name__ == "__main__":
    main()
