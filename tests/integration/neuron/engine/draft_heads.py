"""Tiny draft heads in torch, which learn to predict what a model generates."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from draft_models import TEXT, VOCABULARY, related_tokens
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen

HYBRID: dict[str, Any] = TEXT | {
    "model_type": "qwen3_5_text",
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
_FULL_ATTENTION = 3  # layer of this type


class Mtp(nn.Module):
    """The multi-token prediction of Qwen3.5."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        config: Any = model.config
        width, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(2 * width, width, bias=False)
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden, self.norm = (
            qwen.Qwen3_5RMSNorm(width, eps) for _ in range(3)
        )
        self.layers = nn.ModuleList([qwen.Qwen3_5DecoderLayer(config, _FULL_ATTENTION)])
        randomize(self)

    def forward(self, model: Any, tokens: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits and outputs for embeddings of `tokens` [B, T], and hidden states of the tokens before."""
        embedding = self.pre_fc_norm_embedding(model.model.embed_tokens(tokens))
        hidden = self.fc(torch.cat((embedding, self.pre_fc_norm_hidden(states)), -1))
        positions = torch.arange(tokens.shape[1]).view(1, 1, -1).expand(3, tokens.shape[0], -1)
        tables = model.model.rotary_emb(hidden, positions)
        hidden = self.norm(self.layers[0](hidden, position_embeddings=tables))
        return model.lm_head(hidden), hidden


def randomize(head: nn.Module, seed: int = 5) -> None:
    """Set random weights, also of norms."""
    torch.manual_seed(seed)
    for name, parameter in head.named_parameters():
        mean = float("norm" in name and bool((parameter == 1).all()))
        nn.init.normal_(parameter, mean=mean, std=0.1)


def last_states(model: Any, tokens: Tensor) -> Tensor:
    """Return the hidden states of `model` after its last norm, for `tokens` [B, T]."""
    return model.model(tokens).last_hidden_state


def train(head: nn.Module, model: Any, states_of: Callable[[Any, Tensor], Tensor], steps: int = 70) -> None:
    """Let `head` learn the model's next tokens, and also from its own outputs."""
    all_tokens = torch.tensor([likely_tokens(random.Random(number), 48) for number in range(32)])
    with torch.no_grad():  # once, because the layers of the model are slow in plain torch
        all_targets = model(all_tokens).logits.softmax(-1)
        all_states = states_of(model, all_tokens)[:, :-1]
    optimizer = torch.optim.AdamW(head.parameters(), lr=5e-3)
    for step in range(steps):
        chosen = torch.arange(8 * step, 8 * step + 8) % len(all_tokens)
        tokens, targets, states = all_tokens[chosen], all_targets[chosen], all_states[chosen]
        loss: Any = 0.0
        for ahead in (1, 2):
            # The row of position p has the token at p + ahead, and predicts the token at p + ahead + 1.
            logits, states = head(model, tokens[:, ahead:], states)
            loss = loss - (targets[:, ahead:] * logits.log_softmax(-1)).sum(-1).mean()
            states = states[:, :-1]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def likely_tokens(chance: random.Random, length: int) -> list[int]:
    """Return tokens as `related_model` prefers them, with a random token now and then."""
    following = related_tokens().tolist()
    tokens = [chance.randrange(VOCABULARY)]
    while len(tokens) < length:
        tokens.append(chance.randrange(VOCABULARY) if chance.random() < 0.15 else following[tokens[-1]])
    return tokens


def add_mtp(folder: Path, head: nn.Module) -> None:
    """Write the tensors `mtp.*` to the checkpoint of a model."""
    tensors = {f"mtp.{name}": tensor.contiguous() for name, tensor in head.state_dict().items()}
    save_file(tensors, folder / "mtp.safetensors", {"format": "pt"})
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    names = {name: file for name, file in index["weight_map"].items() if not name.startswith("mtp.")}
    index["weight_map"] = names | dict.fromkeys(tensors, "mtp.safetensors")
    path.write_text(json.dumps(index))
