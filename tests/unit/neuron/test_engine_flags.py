"""Options of vLLM and llama.cpp as options of `neuron serve`."""

import pytest
from cyclopts import App

from helexa.core.errors import ConfigError
from helexa.neuron.cli import serve
from helexa.neuron.config import read_config
from helexa.neuron.engine_flags import EngineFlags


def parse(arguments: str) -> EngineFlags:
    _, bound, _ = App(default_command=serve).parse_args(arguments.split(), exit_on_error=False, print_error=False)
    return bound.arguments.get("engine", EngineFlags())


@pytest.mark.parametrize(
    ("arguments", "key", "value"),
    [
        ("--max-model-len 4096", "context_length", 4096),
        ("--ctx-size 4096", "context_length", 4096),
        ("--max-num-seqs 2", "max_sequences", 2),
        ("-np 2", "max_sequences", 2),
        ("--parallel 2", "max_sequences", 2),
        ("--max-num-batched-tokens 100", "max_step_tokens", 100),
        ("--kv-cache-dtype fp8", "kv_dtype", "int8"),
        ("--kv-cache-dtype bfloat16", "kv_dtype", "auto"),
        ("--enforce-eager", "graphs", False),
        ("--device cpu", "device", "cpu"),
        ("--dtype half", "dtype", "float16"),
    ],
)
def test_option_overrides_variable_and_default(arguments, key, value):
    environ = {"NEURON_HARNESS__TORCH__CONTEXT_LENGTH": "77", "NEURON_HARNESS__TORCH__MAX_SEQUENCES": "7"}
    torch = read_config(None, environ, flags=parse(f"org/name {arguments}").settings()).harness.torch
    assert getattr(torch, key) == value


def test_invalid_value_names_the_option():
    with pytest.raises(ConfigError, match=r"^--max-num-seqs: harness\.torch\.max_sequences: "):
        read_config(None, {}, flags=parse("--max-num-seqs 0").settings())


def test_model_options_set_the_keys_of_default_models():
    flags = parse("org/name --quantization q4k --tool-call-parser qwen3_coder")
    assert flags.model_settings() == {"quant": "q4k", "tool_parser": "qwen_xml"}


@pytest.mark.parametrize(
    "arguments",
    ["--tool-call-parser own", "--reasoning-parser qwen3", "--enable-auto-tool-choice", "--kv-cache-dtype fp8"],
)
def test_option_with_another_effect_is_noted(arguments):
    (note,) = parse(arguments).notes()
    assert note.startswith(arguments.split()[0])
    assert "tool_parser" not in parse(arguments).model_settings()
