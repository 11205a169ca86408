"""A trained vision model reads handwritten digits through a gateway as well as in transformers."""

import base64
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import Any

import anthropic
import numpy as np
import openai
import pytest

from clients.digits.digit_reader import MODEL as DIGITS_MODEL
from clients.digits.digit_reader import QUESTION, Digit, DigitReader, held_out, png
from clients.stack import MODEL, Stack
from nightly import daily

REQUESTS = 16  # at once
TOLERANCE = 0.005
CLIENTS = ("openai", "anthropic")
CONFIGS = {"float32": 'dtype = "float32"\nkernels = "torch"\nthreads = 1\n', "native": "threads = 1\n"}
Ask = Callable[[list[str]], str]
"""Function that asks for the digits in some PNG files, encoded as base64, and returns the answer."""


@pytest.fixture(scope="module", params=CONFIGS)
def stack(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(DIGITS_MODEL, tmp_path_factory.mktemp("stack"), node_config=CONFIGS[request.param]) as stack:
        yield stack


@pytest.fixture(scope="module", params=CLIENTS)
def ask(request: pytest.FixtureRequest, stack: Stack) -> Iterator[Ask]:
    if request.param == "openai":
        with stack.client() as client:
            yield lambda images: _ask_openai(client, images)
    else:
        with anthropic.Anthropic(base_url=stack.url, api_key="any", max_retries=0) as client:
            yield lambda images: _ask_anthropic(client, images)


def _ask_openai(client: openai.OpenAI, images: list[str]) -> str:
    parts: list[Any] = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{image}"}} for image in images
    ]
    messages: Any = [{"role": "user", "content": [*parts, {"type": "text", "text": QUESTION}]}]
    completion = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=4, temperature=0)
    return completion.choices[0].message.content or ""


def _ask_anthropic(client: anthropic.Anthropic, images: list[str]) -> str:
    parts: list[Any] = [
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": image}} for image in images
    ]
    messages: Any = [{"role": "user", "content": [*parts, {"type": "text", "text": QUESTION}]}]
    message = client.messages.create(model=MODEL, messages=messages, max_tokens=4, extra_body={"temperature": 0})
    return "".join(block.text for block in message.content if block.type == "text")


@pytest.fixture(scope="module")
def prompts() -> list[list[Digit]]:
    """Prompts with one digit, and prompts with three digits."""
    images = list(held_out()[0])
    return [[image] for image in images] + [images[i : i + 3] for i in range(0, len(images), 3)]


@pytest.fixture(scope="module")
def expected_accuracy(prompts: list[list[Digit]]) -> float:
    """The accuracy of transformers in float32."""
    reader = DigitReader()
    answers = [answer for count in (1, 3) for answer in reader.answers([p for p in prompts if len(p) == count])]
    return accuracy(answers)


def accuracy(answers: list[str]) -> float:
    """Return the share of right digits in the answers to `prompts`."""
    digits = held_out()[1]
    right = "".join(map(str, digits)) * 2
    widths = [1] * len(digits) + [3] * (len(digits) // 3)
    padded = "".join(answer[:width].ljust(width) for answer, width in zip(answers, widths, strict=True))
    return float(np.mean([read == digit for read, digit in zip(padded, right, strict=True)]))


@pytest.mark.parametrize(
    ("stack", "ask"),
    daily([("native", "openai")], product(CONFIGS, CLIENTS), several=True),
    indirect=True,
)
def test_model_reads_digits_in_images_sent_by_each_client_with_the_expected_accuracy(
    ask: Ask, prompts: list[list[Digit]], expected_accuracy: float
) -> None:
    encoded = [[base64.b64encode(png(image)).decode() for image in prompt] for prompt in prompts]
    with ThreadPoolExecutor(REQUESTS) as threads:
        answers = list(threads.map(ask, encoded))
    assert expected_accuracy > 0.95
    assert accuracy(answers) == pytest.approx(expected_accuracy, abs=TOLERANCE)
