"""Train a tiny vision-language model to read digits; write the model and the held-out digits next to this file.

The data set is scikit-learn's copy of "Optical Recognition of Handwritten Digits" (E. Alpaydin and C. Kaynak, 1998,
UCI Machine Learning Repository). The images are scaled to 8 bits. Training takes some minutes on one core:

    pip install scikit-learn
    PYTHONPATH=tests:tests/unit:tests/integration:tests/e2e python -m clients.digits.train
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedConfig

from clients.digits.digit_reader import HELD_OUT, MODEL, DigitReader
from neuron.vision_model import write_tokenizer

SEED = 27
HELD_OUT_DIGITS = 396  # the last of the data set: other persons wrote most of them
STEPS = 3000
BATCH = 48  # images
MAX_IMAGES = 3  # in a prompt
LEARNING_RATE = 2e-3

TEXT = {
    "vocab_size": 264,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "max_position_embeddings": 1024,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 500.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [3, 3, 2],
    },
}
VISION = {
    "depth": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_heads": 4,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
}
PREPROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "size": {"shortest_edge": 4096, "longest_edge": 65536},
    "patch_size": 16,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}


def write_settings(folder: Path) -> PreTrainedConfig:
    """Write the tokenizer and the settings of the image processor, and return the configuration of the model."""
    folder.mkdir(exist_ok=True)
    tokenizer = write_tokenizer(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR, indent=2) + "\n")
    tokens = {
        "image_token_id": "<|image_pad|>",
        "vision_start_token_id": "<|vision_start|>",
        "vision_end_token_id": "<|vision_end|>",
        "eos_token_id": "<|im_end|>",
    }
    ids = {name: tokenizer.token_to_id(token) for name, token in tokens.items()}
    text = TEXT | {"eos_token_id": ids["eos_token_id"], "pad_token_id": ids["eos_token_id"]}
    return AutoConfig.for_model("qwen3_5", text_config=text, vision_config=VISION, tie_word_embeddings=True, **ids)


def shifted(images: NDArray[np.uint8], generator: np.random.Generator) -> NDArray[np.uint8]:
    """Return each image [N, 8, 8] moved by at most one pixel."""
    padded = np.pad(images, ((0, 0), (1, 1), (1, 1)))
    offsets = generator.integers(0, 3, (len(images), 2))
    return np.stack([image[y : y + 8, x : x + 8] for image, (y, x) in zip(padded, offsets, strict=True)])


def main() -> None:
    data = load_digits()
    images = (data.images * 255 / 16).round().astype(np.uint8)
    digits = data.target.astype(np.uint8)
    np.savez_compressed(HELD_OUT, images=images[-HELD_OUT_DIGITS:], digits=digits[-HELD_OUT_DIGITS:])
    images, digits = images[:-HELD_OUT_DIGITS], digits[:-HELD_OUT_DIGITS]

    torch.manual_seed(SEED)
    torch.set_num_threads(1)
    generator = np.random.default_rng(SEED)
    model = AutoModelForImageTextToText.from_config(write_settings(MODEL), dtype=torch.float32)
    reader = DigitReader(model=model)
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, STEPS, pct_start=0.1)
    for step in range(STEPS):
        number = 1 + step % MAX_IMAGES
        chosen = generator.integers(0, len(images), (BATCH // number, number))
        prompts = shifted(images[chosen.ravel()], generator).reshape(*chosen.shape, 8, 8)
        loss = model(**reader.inputs(prompts, ["".join(map(str, row)) for row in digits[chosen]])).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0:
            print(f"step {step}: loss {loss.item():.3f}", file=sys.stderr)
    model.to(torch.bfloat16).save_pretrained(MODEL)


if __name__ == "__main__":
    main()
