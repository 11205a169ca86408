"""Requests with images to a node with a real engine."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from PIL import Image

from neuron.running_node import Node, running
from neuron.vision.images import encoded
from neuron.vision_model import chat, image_part, write_tokenizer
from reference.vision_language import VisionLanguageModel, picture

pytestmark = pytest.mark.asyncio(loop_scope="module")

OPTIONS = {"DTYPE": "float32", "KERNELS": "torch", "KV_CACHE_MB": "16", "MAX_IMAGE_TOKENS": "64", "THREADS": "1"}
PROMPT = "<|im_start|>user\n"
AFTER = "<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> VisionLanguageModel:
    folder = tmp_path_factory.mktemp("model")
    tokenizer = write_tokenizer(folder)
    token = tokenizer.token_to_id("<|image_pad|>")
    assert token is not None
    model = VisionLanguageModel(folder, "qwen3_5", image_token=token)
    settings = {"size": {"shortest_edge": 4096, "longest_edge": 65536}}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return model


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def node(model: VisionLanguageModel) -> AsyncIterator[Node]:
    environ = {f"NEURON_HARNESS__TORCH__{name}": value for name, value in OPTIONS.items()}
    async with running(environ, engine=None) as node:
        assert await node.load(model.folder) == (200, {"status": "loaded"})
        yield node


async def answer(node: Node, *content: dict[str, Any] | str, **settings: Any) -> dict[str, Any]:
    status, body = await node.post("/v1/chat/completions", chat(*content, **settings))
    assert status == 200, body
    return body


def expected(model: VisionLanguageModel, *parts: str | Image.Image, steps: int = 6) -> str:
    """Return the greedy answer of transformers to a user message."""
    tokenizer = model.tokenizer
    prompt = model.prompt(
        tokenizer.encode(PROMPT).ids,
        *(tokenizer.encode(part).ids if isinstance(part, str) else part for part in parts),
        tokenizer.encode(AFTER).ids,
        around=tokenizer.encode("<|vision_start|><|vision_end|>").ids,
    )
    tokens: list[int] = []
    for _ in range(steps):
        tokens.append(int(model.logits(prompt, tokens)[-1].argmax()))
    return tokenizer.decode(tokens)


async def test_answer_to_a_prompt_with_an_image_equals_that_of_transformers(
    node: Node, model: VisionLanguageModel
) -> None:
    image = picture(100, 70)
    body = await answer(node, "look: ", image_part(image), " what is it?")
    assert body["choices"][0]["message"]["content"] == expected(model, "look: ", image, " what is it?")
    details = body["usage"]["prompt_tokens_details"]
    assert details["image_tokens"] == model.prepared(image).layout.tokens
    assert body["usage"]["prompt_tokens"] > details["image_tokens"]


async def test_answer_to_a_prompt_with_two_images_equals_that_of_transformers(
    node: Node, model: VisionLanguageModel
) -> None:
    first, second = picture(64, 64, 1), picture(120, 60, 2)
    body = await answer(node, image_part(first), "and", image_part(second))
    assert body["choices"][0]["message"]["content"] == expected(model, first, "and", second)


async def test_model_that_reads_images_lists_the_capability_vision(node: Node) -> None:
    _, models = await node.get("/models")
    assert models[0]["capabilities"] == ["text", "vision"]
    _, models = await node.get("/v1/models")
    assert models["data"][0]["capabilities"] == ["text", "vision"]
    assert await node.get("/models/org%2Ftiny/capabilities") == (200, {"capabilities": ["text", "vision"]})


async def test_large_image_is_shrunk_to_max_image_tokens(node: Node) -> None:
    """`max_image_tokens` of the node and `longest_edge` of the model both allow 64 tokens."""
    body = await answer(node, image_part(picture(1000, 900)))
    assert 32 < body["usage"]["prompt_tokens_details"]["image_tokens"] <= 64


async def test_prompt_with_the_same_image_hits_the_prefix_cache_and_another_image_does_not(node: Node) -> None:
    parts = ("a" * 80, image_part(picture(256, 256, 7)), "b" * 100)
    first = await answer(node, *parts, logprobs=True)
    again = await answer(node, *parts, logprobs=True)
    assert again["choices"][0]["message"] == first["choices"][0]["message"]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 128
    other = await answer(node, "a" * 80, image_part(picture(256, 256, 8)), "b" * 100, logprobs=True)
    assert other["usage"]["prompt_tokens_details"]["cached_tokens"] <= 64
    logprobs = [answer["choices"][0]["logprobs"]["content"][0]["logprob"] for answer in (first, again, other)]
    assert logprobs[1] == pytest.approx(logprobs[0], abs=1e-4)
    assert logprobs[2] != pytest.approx(logprobs[0], abs=1e-3)


async def test_prompt_with_an_image_is_read_from_disk_after_the_model_was_unloaded(
    model: VisionLanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HELEXA_CACHE", str(tmp_path))
    options = OPTIONS | {"PREFIX_DISK_MB": "100", "SNAPSHOT_MB": "8"}
    before, after = "a" * 80, "b" * 100
    async with running({f"NEURON_HARNESS__TORCH__{name}": value for name, value in options.items()}, None) as node:
        assert await node.load(model.folder) == (200, {"status": "loaded"})
        first = await answer(node, before, image_part(picture(256, 256, 7)), after)
        await node.post("/models/unload", {"model_id": "org/tiny"})
        assert await node.load(model.folder) == (200, {"status": "loaded"})
        again = await answer(node, before, image_part(picture(256, 256, 7)), after)
        assert again["choices"][0]["message"] == first["choices"][0]["message"]
        _, health = await node.get("/health")
        assert health["models"][0]["disk_prompt_tokens_total"] >= 128
        other = await answer(node, before, image_part(picture(256, 256, 8)), after)
        assert other["usage"]["prompt_tokens_details"]["cached_tokens"] <= 64


async def test_image_that_appears_in_two_prompts_is_encoded_once(node: Node) -> None:
    async def images() -> tuple[int, int]:
        _, health = await node.get("/health")
        (load,) = health["models"]
        return load["encoded_images_total"], load["reused_images_total"]

    encoded_before, reused_before = await images()
    await answer(node, "first", image_part(picture(96, 64, 11)))
    await answer(node, "another", image_part(picture(96, 64, 11)))
    assert await images() == (encoded_before + 1, reused_before + 1)


async def test_conversation_continues_after_an_answer_that_contains_an_image_token(
    node: Node, model: VisionLanguageModel
) -> None:
    """An image token that the model generates is no image, and the conversation can go on."""
    token = model.tokenizer.token_to_id("<|image_pad|>")
    image = image_part(picture(64, 64))
    body = await answer(node, "x", image, logit_bias={str(token): 100}, max_tokens=12)
    message = body["choices"][0]["message"]
    assert "image_pad" not in (message["content"] or "")
    assert body["usage"]["completion_tokens"] == 12
    request = chat("x", image)
    request["messages"] += [message, {"role": "user", "content": "more"}]
    status, body = await node.post("/v1/chat/completions", request)
    assert status == 200, body


async def test_image_in_an_assistant_message_is_read(node: Node, model: VisionLanguageModel) -> None:
    first, second = picture(64, 64, 4), picture(96, 64, 5)
    request = chat("draw", image_part(first))
    request["messages"] += [
        {"role": "assistant", "content": [image_part(second), {"type": "text", "text": "here"}]},
        {"role": "user", "content": "what is it?"},
    ]
    status, body = await node.post("/v1/chat/completions", request)
    assert status == 200, body
    parts = ["draw", first, f"{AFTER}", second, "here<|im_end|>\n<|im_start|>user\nwhat is it?"]
    assert body["choices"][0]["message"]["content"] == expected(model, *parts)


async def test_token_count_of_a_prompt_with_an_image_equals_the_usage(node: Node) -> None:
    request = chat("look: ", image_part(picture(90, 90)))
    _, counted = await node.post("/tokenize", {"model": "org/tiny", "messages": request["messages"]})
    body = await answer(node, "look: ", image_part(picture(90, 90)))
    assert counted["count"] == body["usage"]["prompt_tokens"]


async def test_responses_api_accepts_a_prompt_with_an_image(node: Node) -> None:
    part = image_part(picture(64, 64))
    content = [{"type": "input_image", "image_url": part["image_url"]["url"]}, {"type": "input_text", "text": "it?"}]
    request = {"model": "org/tiny", "input": [{"role": "user", "content": content}], "temperature": 0}
    status, body = await node.post("/v1/responses", request | {"max_output_tokens": 16})
    assert status == 200, body
    assert body["usage"]["input_tokens"] > 4


PNG = encoded(picture(32, 32))


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}, "data URLs"),
        ({"type": "image_url", "image_url": {"url": "data:image/png,abc"}}, "base64"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,@@"}}, "invalid base64"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}, "empty"),
        (image_part(b"not an image"), "PNG, JPEG, WebP or GIF"),
        (image_part(PNG[: len(PNG) // 2]), "damaged"),
        (image_part(b"x" * (21 << 20)), "limit is 20971520"),
        (image_part(picture(1, 300)), "200 times as long"),
        (image_part(PNG, detail="huge"), "supported: auto"),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else "",
)
async def test_unusable_image_is_rejected(node: Node, part: dict[str, Any], message: str) -> None:
    status, body = await node.post("/v1/chat/completions", chat("look", part))
    assert (status, body["error"]["code"]) == (400, "invalid_image")
    assert message in body["error"]["message"]
    assert body["error"]["param"] == "messages.0.content.1"


async def test_malformed_image_part_is_rejected(node: Node) -> None:
    for part in ({"type": "image_url"}, {"type": "image_url", "image_url": "x"}, {"type": "input_image"}):
        status, body = await node.post("/v1/chat/completions", chat(part))
        assert (status, body["error"]["code"]) == (400, "invalid_request_body")


async def test_image_placeholder_token_in_message_text_is_rejected(node: Node) -> None:
    status, body = await node.post("/v1/chat/completions", chat("<|image_pad|>", image_part(PNG)))
    assert (status, body["error"]["code"]) == (400, "invalid_image")


async def test_too_many_images_are_rejected(node: Node) -> None:
    status, body = await node.post("/v1/chat/completions", chat(*[image_part(PNG)] * 129))
    assert (status, body["error"]["code"]) == (400, "invalid_image")


async def test_animated_gif_with_an_unusual_media_type_is_accepted(node: Node) -> None:
    frames = [picture(64, 64, seed) for seed in range(3)]
    gif = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])
    part = image_part(gif)
    part["image_url"]["url"] = part["image_url"]["url"].replace("image/png", "Application/X;name=a")
    await answer(node, part)
