"""A tiny vision-language model with a tokenizer and a chat template, and requests with images."""

import base64
import json
from pathlib import Path
from typing import Any

import tokenizers
from PIL import Image
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from neuron.vision.images import encoded

CONTROL = ["<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tokenizer(folder: Path) -> tokenizers.Tokenizer:
    """Write a tokenizer whose tokens are the bytes and `CONTROL`, and a chat template with images."""
    tokenizer = tokenizers.Tokenizer(BPE({text: index for index, text in enumerate(sorted(ByteLevel.alphabet()))}, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.add_special_tokens(CONTROL)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"chat_template": TEMPLATE, "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return tokenizer


def image_part(image: Image.Image | bytes, **settings: Any) -> dict[str, Any]:
    """Return a content part with an image, as PNG, or with the given contents of a file."""
    data = image if isinstance(image, bytes) else encoded(image)
    url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
    return {"type": "image_url", "image_url": {"url": url, **settings}}


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def chat(*content: dict[str, Any] | str, **settings: Any) -> dict[str, Any]:
    """Return a greedy chat request with one user message."""
    parts = [text_part(part) if isinstance(part, str) else part for part in content]
    return {
        "model": "org/tiny",
        "messages": [{"role": "user", "content": parts}],
        "temperature": 0,
        "max_tokens": 6,
        "ignore_eos": True,
    } | settings
