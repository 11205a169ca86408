"""Generates random tools and models with random weights, and checks responses that must call a tool."""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import tokenizers
from safetensors.numpy import save_file

Schema = dict[str, Any]

WORDS = ("city", "days", "größe", "x-y", "天気", "unit_2", "a.b", "query", "limit", "naïve", "path", "options", "ids")
HIDDEN = 64


@dataclass(frozen=True)
class Task:
    """The tools of a request that must call a tool.

    Attributes:
        number: number of the task.
        tools: JSON Schema of the arguments of each offered tool, by name.
        forced: name of the tool that the field `tool_choice` names; None if the model may choose one of the tools.
    """

    number: int
    tools: dict[str, Schema]
    forced: str | None


@dataclass(frozen=True)
class CallResult:
    """The tool calls of a response.

    Attributes:
        calls: name and arguments (as JSON text) of each tool call.
        cut: whether the response ended at the length limit.
        error: error message of the request or of the stream; empty if there was no error.
    """

    calls: Sequence[tuple[str, str]] = ()
    cut: bool = False
    error: str = ""


def random_task(number: int, seed: int) -> Task:
    """Return a task with one to four random tools. In half of all tasks, `tool_choice` names one of the tools."""
    rng = random.Random(f"{seed}/{number}")
    tools = {f"{rng.choice(WORDS)}_{index}": random_tool(rng) for index in range(rng.randint(1, 4))}
    return Task(number, tools, rng.choice([*tools]) if rng.random() < 0.5 else None)


def random_tool(rng: random.Random) -> Schema:
    """Return a random JSON Schema for the arguments of a tool."""
    return _object(rng, depth=2)


def problem(task: Task, result: CallResult) -> str:
    """Return why the tool calls `result` are not a valid response to `task`, or an empty text if they are valid.

    If the response ended at the length limit, its last call is incomplete and is not checked.
    """
    if result.error:
        return result.error
    complete = result.calls[:-1] if result.cut else result.calls
    if not complete and not result.cut:
        return "no call"
    if task.forced and len(result.calls) > 1:
        return f"{len(result.calls)} calls instead of one"
    for name, arguments in complete:
        if name not in ([task.forced] if task.forced else task.tools):
            return f"the tool {name!r} is not on offer"
        try:
            jsonschema.Draft202012Validator(task.tools[name]).validate(json.loads(arguments))
        except (ValueError, jsonschema.ValidationError) as error:
            return f"{name}({arguments}): {str(error).splitlines()[0]}"
    return ""


def write_random_model(tokenizer: Path, folder: Path) -> Path:
    """Write a small Llama model with random weights to `folder`, and return `folder`.

    The model uses the tokenizer and the chat template in the folder `tokenizer`.
    """
    folder.mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).symlink_to((tokenizer / name).absolute())
    width = tokenizers.Tokenizer.from_file(str(tokenizer / "tokenizer.json")).get_vocab_size()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": HIDDEN,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "vocab_size": width,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    generator = np.random.default_rng(0)

    def matrix(rows: int) -> np.ndarray:
        return generator.normal(0, 0.1, (rows, HIDDEN)).astype(np.float32)

    names = [f"self_attn.{projection}_proj" for projection in "qkvo"] + [
        f"mlp.{projection}_proj" for projection in ("gate", "up", "down")
    ]
    weights = {f"model.layers.0.{name}.weight": matrix(HIDDEN) for name in names}
    ones = np.ones(HIDDEN, np.float32)
    norms = ("layers.0.input_layernorm", "layers.0.post_attention_layernorm", "norm")
    weights |= {f"model.{name}.weight": ones for name in norms}
    save_file(weights | {"model.embed_tokens.weight": matrix(width)}, folder / "model.safetensors")
    return folder


def _object(rng: random.Random, depth: int) -> Schema:
    names = rng.sample(WORDS, rng.randint(0 if depth == 2 else 1, 4))
    return {
        "type": "object",
        "properties": {name: _value(rng, depth - 1) for name in names},
        "required": [name for name in names if rng.random() < 0.6],
        "additionalProperties": False,
    }


def _value(rng: random.Random, depth: int) -> Schema:
    kind = rng.choice(["string", "integer", "number", "boolean", "enum", "array", "object", "pattern", "nullable"])
    if depth == 0 and kind in ("array", "object", "nullable"):
        kind = "string"
    low = rng.randint(-50, 50)
    match kind:
        case "string":
            return {"type": "string", "maxLength": rng.randint(1, 16)}
        case "integer":
            return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 2000)}
        case "number":
            return {"type": "number", "minimum": low, "maximum": low + 10}
        case "enum":
            return {"enum": rng.sample(["a", "b c", "ü", "天", 7, -1.5, None, True, "</tool_call>", '"]}'], 3)}
        case "array":
            return {"type": "array", "items": _value(rng, depth - 1), "minItems": rng.randint(0, 1), "maxItems": 3}
        case "object":
            return _object(rng, depth)
        case "pattern":
            return {"type": "string", "pattern": rng.choice(["^[a-z]{2,8}$", r"^\d{3}-\d{4}$", "^(red|green)$"])}
        case "nullable":
            return {"anyOf": [_value(rng, 0), {"type": "null"}]}
        case _:
            return {"type": "boolean"}
