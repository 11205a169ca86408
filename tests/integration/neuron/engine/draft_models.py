"""Pairs of a tiny model and a tiny draft model that agree on many tokens."""

import random
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from neuron.vision_model import write_tokenizer
from tiny_models import tiny_model

VOCABULARY = 320
TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 257,
}
DRAFT = TEXT | {"model_type": "llama", "num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2}


def related_model(folder: Path, strength: float = 2.0, seed: int = 0, **settings: Any) -> PreTrainedModel:
    """Write a model that prefers one next token after each token, the same in all these models.

    Args:
        strength: how strongly the model prefers this token. The rest depends on the layers' random weights.
    """
    folder.mkdir(exist_ok=True)
    model = tiny_model(folder, seed=seed, **settings)
    following = related_tokens()
    with torch.no_grad():
        embedding = model.get_input_embeddings().weight
        embedding.normal_()
        head = model.get_output_embeddings().weight
        head.normal_(std=0.1)
        head[following] += strength * embedding / embedding.shape[1] ** 0.5
    model.save_pretrained(folder, max_shard_size="50kB")
    write_tokenizer(folder)
    return model


def related_tokens() -> Tensor:
    """Return the token that `related_model` prefers after each token."""
    return torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(7))


def trained_model(folder: Path, steps: int, **settings: Any) -> None:
    """Write a model that has learned short sentences, so that models of this kind agree on most tokens."""
    folder.mkdir()
    model = tiny_model(folder, **settings)
    for name, parameter in model.named_parameters():
        torch.nn.init.ones_(parameter) if "norm" in name else torch.nn.init.normal_(parameter, std=0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    chance = random.Random(3)
    for _ in range(steps):
        batch = torch.tensor([sentences(chance)[:80] for _ in range(8)])
        model(batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder, max_shard_size="50kB")
    write_tokenizer(folder)


def sentences(chance: random.Random) -> list[int]:
    """Return random sentences as tokens, one for each byte."""
    subjects, verbs = ("the red fox", "a small bird", "her old dog"), ("sees", "likes", "follows")
    parts = (f"{chance.choice(subjects)} {chance.choice(verbs)} {chance.choice(subjects)}. " for _ in range(4))
    return list("".join(parts).encode())
