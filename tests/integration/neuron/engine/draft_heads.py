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

DENSE: dict[str, Any] = TEXT | {"model_type": "llama"}
EAGLE_LAYERS = (1, 2, 3)  # layers whose inputs an EAGLE-3 head reads
# Tokens that the head predicts: all but every tenth. Their number is a multiple of the rows of a kernel's tile.
EAGLE_TOKENS = torch.tensor([token for token in range(VOCABULARY) if token % 10 != 9])


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


class Eagle(nn.Module):
    """A head of EAGLE-3 in plain torch, with the tensor names of SpecForge.

    Args:
        favorable: whether to begin with the output head of the model, and with attention to the own position, so that
            training is short.
    """

    def __init__(self, model: PreTrainedModel, favorable: bool = False) -> None:
        super().__init__()
        config: Any = model.config
        width = config.hidden_size
        self.width, self.heads, self.kv_heads, self.dim = width, 4, 2, 32
        self.fc = nn.Linear(len(EAGLE_LAYERS) * width, width, bias=False)
        self.midlayer = nn.ModuleDict(
            {
                "input_layernorm": nn.RMSNorm(width, 1e-6),
                "hidden_norm": nn.RMSNorm(width, 1e-6),
                "post_attention_layernorm": nn.RMSNorm(width, 1e-6),
                "self_attn": nn.ModuleDict(
                    {
                        "q_proj": nn.Linear(2 * width, self.heads * self.dim, bias=False),
                        "k_proj": nn.Linear(2 * width, self.kv_heads * self.dim, bias=False),
                        "v_proj": nn.Linear(2 * width, self.kv_heads * self.dim, bias=False),
                        "o_proj": nn.Linear(self.heads * self.dim, width, bias=False),
                    }
                ),
                "mlp": nn.ModuleDict(
                    {
                        "gate_proj": nn.Linear(width, 96, bias=False),
                        "up_proj": nn.Linear(width, 96, bias=False),
                        "down_proj": nn.Linear(96, width, bias=False),
                    }
                ),
            }
        )
        self.norm = nn.RMSNorm(width, 1e-6)
        self.lm_head = nn.Linear(width, len(EAGLE_TOKENS), bias=False)
        randomize(self)
        layer: Any = self.midlayer
        if favorable:
            output: Any = model.get_output_embeddings()
            self.lm_head.weight.data = output.weight.data[EAGLE_TOKENS].clone()
            keys = layer["self_attn"]["k_proj"].weight.data.view(self.kv_heads, self.dim, -1)
            queries = keys.repeat_interleave(self.heads // self.kv_heads, 0)
            layer["self_attn"]["q_proj"].weight.data = queries.reshape(self.heads * self.dim, -1)

    def forward(self, model: Any, tokens: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits of all tokens, and outputs, for `tokens` [B, T] and the states of the tokens before."""
        logits, outputs = self.run(model, tokens, states)
        whole = torch.full((*tokens.shape, VOCABULARY), -20.0)
        whole[..., EAGLE_TOKENS] = logits
        return whole, outputs

    def run(self, model: Any, tokens: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits of the tokens of the head, and outputs (see `forward`)."""
        layer: Any = self.midlayer
        if states.shape[-1] > self.width:
            states = self.fc(states)
        embedding = model.model.embed_tokens(tokens)
        inputs = torch.cat((layer["input_layernorm"](embedding), layer["hidden_norm"](states)), -1)
        hidden = states + self._attend(layer["self_attn"], inputs)
        normed = layer["post_attention_layernorm"](hidden)
        mlp = layer["mlp"]
        hidden = hidden + mlp["down_proj"](nn.functional.silu(mlp["gate_proj"](normed)) * mlp["up_proj"](normed))
        return self.lm_head(self.norm(hidden)), hidden

    def _attend(self, attention: Any, inputs: Tensor) -> Tensor:
        batch, length = inputs.shape[:2]
        queries, keys, values = (
            attention[name](inputs).view(batch, length, -1, self.dim).transpose(1, 2)
            for name in ("q_proj", "k_proj", "v_proj")
        )
        keys, values = (part.repeat_interleave(self.heads // self.kv_heads, 1) for part in (rotate(keys), values))
        out = nn.functional.scaled_dot_product_attention(rotate(queries), keys, values, is_causal=True)
        return attention["o_proj"](out.transpose(1, 2).reshape(batch, length, -1))


def rotate(heads: Tensor, base: float = 10000.0) -> Tensor:
    """Return `heads` [B, heads, T, D] after the rotary embedding of Llama."""
    half = heads.shape[-1] // 2
    angles = torch.outer(torch.arange(heads.shape[2]), base ** (-torch.arange(half) / half))
    first, second = heads[..., :half], heads[..., half:]
    return torch.cat((first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()), -1)


def layer_inputs(model: Any, tokens: Tensor) -> Tensor:
    """Return the inputs of the layers `EAGLE_LAYERS` for `tokens` [B, T], side by side."""
    states = model.model(tokens, output_hidden_states=True).hidden_states
    return torch.cat([states[layer] for layer in EAGLE_LAYERS], -1)


def write_eagle(folder: Path, head: Eagle, **settings: Any) -> None:
    """Write a checkpoint of an EAGLE-3 head."""
    folder.mkdir(exist_ok=True)
    known = torch.zeros(VOCABULARY, dtype=torch.bool)
    known[EAGLE_TOKENS] = True
    offsets = EAGLE_TOKENS - torch.arange(len(EAGLE_TOKENS))
    tensors = {name: tensor.contiguous() for name, tensor in head.state_dict().items()}
    save_file(tensors | {"d2t": offsets, "t2d": known}, folder / "model.safetensors", {"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": head.width,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": head.heads,
        "num_key_value_heads": head.kv_heads,
        "head_dim": head.dim,
        "rms_norm_eps": 1e-6,
        "vocab_size": VOCABULARY,
        "draft_vocab_size": len(EAGLE_TOKENS),
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "eagle_aux_hidden_state_layer_ids": list(EAGLE_LAYERS),
    }
    (folder / "config.json").write_text(json.dumps(config | settings))


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
