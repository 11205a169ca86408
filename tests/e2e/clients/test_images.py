"""Images from the clients of OpenAI and Anthropic, through a gateway, to a node with a tiny vision model.

The weights of the model are random, so its answers have no meaning. But they depend on the pixels, and greedy answers
to equal prompts are equal.
"""

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import anthropic
import openai
import pytest

import helexa
from clients.stack import MODEL, Stack, get
from neuron.vision.images import encoded
from neuron.vision_model import write_tokenizer
from reference.vision_language import VisionLanguageModel, picture

KEY = "a-key-with-a-budget"
NODE = 'dtype = "float32"\nkernels = "torch"\nthreads = 1\n'
SIZES = {"size": {"shortest_edge": 4096, "longest_edge": 1 << 20}}
PNG = encoded(picture(640, 480))  # 300 tokens
OTHER_PNG = encoded(picture(640, 480, 1))
GREEDY: dict[str, Any] = {"temperature": 0, "extra_body": {"ignore_eos": True}}


def data_url(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


class _Images(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(PNG)))
        self.end_headers()
        self.wfile.write(PNG)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def image_url() -> Iterator[str]:
    """The URL of `PNG` on a server on this machine."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Images)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/a.png"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="module")
def stack(image_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    model = tmp_path_factory.mktemp("vision-model")
    tokenizer = write_tokenizer(model)
    VisionLanguageModel(model, "qwen3_5", image_token=tokenizer.token_to_id("<|image_pad|>"))
    (model / "preprocessor_config.json").write_text(json.dumps(SIZES))
    host = image_url.removeprefix("http://").partition("/")[0]
    gateway = (
        f'[images]\nallowed_hosts = ["{host}"]\nprivate_networks = ["127.0.0.0/8"]\n'
        f'[[entitlements.keys]]\nkey = "{KEY}"\naccount_id = "acme"\nkey_id = "capped"\nhard_cap = 20000\n'
    )
    with Stack(model, tmp_path_factory.mktemp("stack"), node_config=NODE, gateway_config=gateway) as stack:
        yield stack


@pytest.fixture(scope="module")
def client(stack: Stack) -> Iterator[openai.OpenAI]:
    with stack.client() as client:
        yield client


@pytest.fixture(scope="module")
def claude(stack: Stack) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=stack.url, api_key="any", max_retries=0) as client:
        yield client


def ask(client: openai.OpenAI, url: str | None, text: str = "What is it?", **image: str) -> Any:
    parts: list[Any] = [] if url is None else [{"type": "image_url", "image_url": {"url": url, **image}}]
    messages: Any = [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]
    return client.chat.completions.create(model=MODEL, messages=messages, max_tokens=8, **GREEDY)


def source(data: bytes) -> dict[str, Any]:
    return {"type": "base64", "media_type": "image/png", "data": base64.b64encode(data).decode()}


def message(claude: anthropic.Anthropic, *content: Any, **fields: Any) -> Any:
    messages: Any = fields.pop("messages", [{"role": "user", "content": list(content)}])
    greedy = {"temperature": 0, "ignore_eos": True}  # this SDK has no parameter for the temperature
    return claude.messages.create(model=MODEL, messages=messages, max_tokens=8, extra_body=greedy)


QUESTION = {"type": "text", "text": "What is it?"}


def test_model_entry_of_a_vision_model_lists_the_vision_capability(client: openai.OpenAI, claude: anthropic.Anthropic):
    assert client.models.retrieve(MODEL).to_dict()["capabilities"] == ["text", "vision"]
    capabilities = claude.models.retrieve(MODEL).capabilities
    assert capabilities is not None and capabilities.image_input.supported


def test_prompt_with_an_image_has_the_same_answer_and_token_count_in_all_apis(
    client: openai.OpenAI, claude: anthropic.Anthropic, stack: Stack, image_url: str
):
    first = ask(client, data_url(PNG))
    text, tokens = first.choices[0].message.content, first.usage.prompt_tokens
    assert tokens - ask(client, None).usage.prompt_tokens > 300  # 300 image tokens, and two around them
    fetched = ask(client, image_url)
    assert (fetched.choices[0].message.content, fetched.usage.prompt_tokens) == (text, tokens)
    parts: Any = [
        {"type": "input_image", "image_url": image_url, "detail": "original"},
        {"type": "input_text", "text": "What is it?"},
    ]
    response = client.responses.create(
        model=MODEL, input=[{"role": "user", "content": parts}], max_output_tokens=8, **GREEDY
    )
    assert response.usage is not None
    assert (response.output_text, response.usage.input_tokens) == (text, tokens)
    for image in (source(PNG), {"type": "url", "url": image_url}):
        answer = message(claude, {"type": "image", "source": image}, QUESTION)
        usage = answer.usage
        assert answer.content[0].text == text
        assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == tokens
    completion = helexa.generate(
        "What is it?", images=[PNG], target=stack.url, model=MODEL, max_tokens=8, temperature=0, think=False
    )
    assert completion.usage.prompt == tokens
    assert ask(client, data_url(OTHER_PNG)).choices[0].message.content != text


def test_equal_images_share_the_prefix_cache(client: openai.OpenAI):
    image = encoded(picture(640, 480, 2))
    assert not _cached(ask(client, data_url(image)))
    assert _cached(ask(client, data_url(image))) >= 256
    assert not _cached(ask(client, data_url(encoded(picture(640, 480, 3)))))


def _cached(answer: Any) -> int:
    details = answer.usage.prompt_tokens_details
    return details.cached_tokens if details else 0


def test_token_counts_of_prompts_with_images_equal_the_usage(
    client: openai.OpenAI, claude: anthropic.Anthropic, image_url: str
):
    content: Any = [{"type": "image", "source": {"type": "url", "url": image_url}}, QUESTION]
    counted = claude.messages.count_tokens(model=MODEL, messages=[{"role": "user", "content": content}])
    assert counted.input_tokens == ask(client, image_url).usage.prompt_tokens
    parts: Any = [{"type": "input_image", "image_url": image_url, "detail": "auto"}]
    counted_input = client.responses.input_tokens.count(model=MODEL, input=[{"role": "user", "content": parts}])
    response = client.responses.create(model=MODEL, input=[{"role": "user", "content": parts}], max_output_tokens=1)
    assert response.usage is not None
    assert counted_input.input_tokens == response.usage.input_tokens > 300


def test_low_detail_reduces_the_tokens_of_an_image(client: openai.OpenAI):
    high, low = (ask(client, data_url(PNG), detail=detail).usage.prompt_tokens for detail in ("high", "low"))
    assert high - low >= 300 - 256
    with pytest.raises(openai.BadRequestError, match="detail"):
        ask(client, data_url(PNG), detail="huge")


def test_image_in_a_tool_result_adds_tokens_to_the_prompt(claude: anthropic.Anthropic):
    turns = [
        {"role": "user", "content": "Look at it."},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "look", "input": {}}]},
    ]

    def result(*content: Any) -> Any:
        blocks = [{"type": "tool_result", "tool_use_id": "t1", "content": list(content)}]
        return message(claude, messages=[*turns, {"role": "user", "content": blocks}])

    image = {"type": "image", "source": source(PNG)}
    seen, unseen = result(QUESTION, image), result(QUESTION)
    tokens = [answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0) for answer in (seen, unseen)]
    assert tokens[0] - tokens[1] > 300


@pytest.mark.parametrize("data", [PNG[: len(PNG) // 2], b"\x89PNG\r\n\x1a\n", b"no image"])
def test_damaged_image_is_rejected(client: openai.OpenAI, claude: anthropic.Anthropic, data: bytes):
    with pytest.raises(openai.BadRequestError, match="image"):
        ask(client, data_url(data))
    with pytest.raises(anthropic.BadRequestError, match="image"):
        message(claude, {"type": "image", "source": source(data)})
    assert ask(client, None).usage.prompt_tokens > 0


def test_budget_of_a_key_is_charged_for_the_tokens_of_images(stack: Stack):
    with stack.client().with_options(api_key=KEY) as client:
        used = ask(client, data_url(PNG), "How much?").usage.total_tokens
    (key,) = [key for key in get(f"{stack.url}/api/keys", KEY)["keys"] if key["key_id"] == "capped"]
    assert key["spent"] == used > 300
