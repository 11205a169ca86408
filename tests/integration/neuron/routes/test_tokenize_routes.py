"""`/tokenize`, `/detokenize` and `/tokenizer_info` over a real socket."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from starlette.applications import Starlette

from helexa.http.listener import Listener
from helexa.neuron.routes import chat, tokens_and_embeddings
from helexa.neuron.routes.replies_disconnects_and_errors import HANDLERS
from neuron import scripted_node
from neuron.scripted_engine import CONTEXT, MODEL, TOKENIZER, Registry, answer, scripted_model

Post = Callable[..., Awaitable[tuple[int, Any]]]

HI = {"role": "user", "content": "Grüße"}
TOOL = {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}


@asynccontextmanager
async def serve(template: str | None = None) -> AsyncIterator[Post]:
    """Run a server with one model. Yield a function that posts a body to a path."""
    app = Starlette(routes=[*chat.routes, *tokens_and_embeddings.routes], exception_handlers=HANDLERS)
    app.state.registry = Registry(scripted_model(answer("x"), template=template))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = Listener(app)
        serving = asyncio.create_task(server.serve(listener))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        try:
            async with aiohttp.ClientSession() as http:

                async def post(path: str, **body: Any) -> tuple[int, Any]:
                    async with http.post(url + path, json={"model": MODEL, **body}) as response:
                        return response.status, await response.json()

                yield post
        finally:
            server.should_exit = True
            await serving


async def test_tokenize_and_detokenize_endpoints_convert_text_and_tokens() -> None:
    text = "Grüße 🦊<|im_end|>"
    async with serve() as post:
        status, reply = await post("/tokenize", prompt=text)
        ids = TOKENIZER.encode(text)
        assert (status, reply) == (200, {"count": len(ids), "max_model_len": CONTEXT, "tokens": ids})
        assert await post("/detokenize", tokens=ids) == (200, {"prompt": text})
        _, reply = await post("/tokenize", prompt="a b", return_token_strs=True)
        assert reply["token_strs"] == ["a", "Ġ", "b"]
        assert (await post("/tokenize", prompt=""))[1]["count"] == 0
        assert (await post("/detokenize", tokens=[]))[1] == {"prompt": ""}


async def test_conversation_tokens_equal_the_prompt_tokens_of_a_chat() -> None:
    messages = [{"role": "developer", "content": "Be brief."}, HI]
    async with serve() as post:
        _, reply = await post("/tokenize", messages=messages)
        _, completion = await post("/v1/chat/completions", messages=messages)
        assert reply["count"] == len(reply["tokens"]) == completion["usage"]["prompt_tokens"]
        assert TOKENIZER.decode(reply["tokens"], skip_special=False) == (
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nGrüße<|im_end|>\n<|im_start|>assistant\n"
        )


async def test_token_count_with_tools_and_thinking_equals_the_prompt_tokens_of_a_chat() -> None:
    template = "{{ tools }}{{ thinking }}{% for m in messages %}{{ m.content }}{% endfor %}"
    tool = {"type": "function", "function": {"name": "now", "description": None}}
    async with serve(template) as post:
        for thinks in (True, False):
            body = {"messages": [HI], "tools": [tool], "chat_template_kwargs": {"enable_thinking": thinks}}
            _, reply = await post("/tokenize", **body)
            _, completion = await post("/v1/chat/completions", **body)
            assert reply["count"] == completion["usage"]["prompt_tokens"]
            assert f"'properties': {{}}}}}}}}]{thinks}" in TOKENIZER.decode(reply["tokens"])


async def test_tokenize_and_chat_reject_tools_that_the_template_ignores() -> None:
    async with serve("{{ messages[0].content }}") as post:
        replies = [await post(path, messages=[HI], tools=[TOOL]) for path in ("/tokenize", "/v1/chat/completions")]
        assert replies[0] == replies[1]
        assert replies[0][0] == 400


async def test_tokenize_leaves_the_final_message_open_with_continue_final_message() -> None:
    async with serve() as post:
        _, plain = await post("/tokenize", messages=[HI], add_generation_prompt=False)
        assert TOKENIZER.decode(plain["tokens"], skip_special=False) == "<|im_start|>user\nGrüße<|im_end|>\n"
        begun = [HI, {"role": "assistant", "content": "Hel"}]
        _, reply = await post("/tokenize", messages=begun, add_generation_prompt=False, continue_final_message=True)
        assert TOKENIZER.decode(reply["tokens"], skip_special=False).endswith("<|im_start|>assistant\nHel")


async def test_tools_and_template_variables_reach_the_chat_template() -> None:
    template = "{{ tools[0].function.name }}|{{ messages[0].content }}|{{ enable_thinking }}"
    async with serve(template) as post:
        _, reply = await post("/tokenize", messages=[HI], tools=[TOOL], chat_template_kwargs={"enable_thinking": False})
        assert TOKENIZER.decode(reply["tokens"]) == "now|Grüße|False"


@pytest.mark.parametrize(
    ("path", "body", "status", "code"),
    [
        ("/tokenize", {}, 400, "invalid_request_body"),
        ("/tokenize", {"prompt": "x", "messages": [HI]}, 400, "invalid_request_body"),
        (
            "/tokenize",
            {"messages": [HI], "continue_final_message": True, "add_generation_prompt": True},
            400,
            "invalid_request_body",
        ),
        ("/tokenize", {"messages": []}, 400, "invalid_request_body"),
        ("/tokenize", {"prompt": 5}, 400, "invalid_request_body"),
        ("/tokenize", {"messages": [HI], "chat_template": "x"}, 400, "unsupported_parameter"),
        ("/tokenize", {"messages": [HI], "add_special_tokens": True}, 400, "unsupported_parameter"),
        ("/tokenize", {"messages": [HI], "chat_template_kwargs": {"tools": []}}, 400, "unsupported_parameter"),
        ("/tokenize", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "vision_unsupported"),
        ("/tokenize", {"prompt": "x", "model": None}, 400, "missing_model_field"),
        ("/tokenize", {"prompt": "x", "model": "Org/Other"}, 404, "model_not_found"),
        ("/detokenize", {}, 400, "invalid_request_body"),
        ("/detokenize", {"tokens": ["x"]}, 400, "invalid_request_body"),
        ("/detokenize", {"tokens": [-1]}, 400, "invalid_request_body"),
        ("/detokenize", {"tokens": [10**6]}, 400, "invalid_request_body"),
    ],
)
async def test_each_invalid_tokenize_request_gets_its_status_and_error_code(
    path: str, body: dict[str, Any], status: int, code: str
) -> None:
    async with serve() as post:
        answered, reply = await post(path, **body)
        assert (answered, reply["error"]["code"]) == (status, code)


async def test_error_raised_by_the_chat_template_is_422() -> None:
    async with serve("{{ raise_exception('no') }}") as post:
        status, reply = await post("/tokenize", messages=[HI])
        assert (status, reply["error"]["code"]) == (422, "template_render_failed")


async def test_tokenizer_info_lists_control_tokens_and_the_chat_template() -> None:
    async with scripted_node.serve(answer("x"), "{{ messages }}", routes=tokens_and_embeddings.routes) as node:
        url = f"{node.url}/tokenizer_info"
        async with node.http.get(url, params={"model": MODEL}) as response:
            info = await response.json()
        for query in ({}, {"model": MODEL, "x": "y"}):
            async with node.http.get(url, params=query) as response:
                assert response.status == 400
    assert (info["eos_token"], info["bos_token"], info["chat_template"]) == ("<|im_end|>", None, "{{ messages }}")
    assert info["model_max_length"] == CONTEXT
