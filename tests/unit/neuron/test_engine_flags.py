"""Options of vLLM and llama.cpp as options of `neuron serve`."""

import pytest
from cyclopts import App

from helexa.core.errors import ConfigError, UsageError
from helexa.neuron.cli import serve
from helexa.neuron.config import read_config
from helexa.neuron.engine_flags import EngineFlags, complete_flags


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
        ("--kv-cache-dtype bfloat16", "kv_dtype", "unquantized"),
        ("--enforce-eager", "graphs", False),
        ("--device cpu", "device", "cpu"),
        ("-ngl 0", "device", "cpu"),
        ("--n-gpu-layers 99", "device", "auto"),
        ("--threads 3", "threads", 3),
        ("-t 3", "threads", 3),
        ("--dtype half", "dtype", "float16"),
    ],
)
def test_engine_option_overrides_environment_variable_and_default(arguments, key, value):
    environ = {"NEURON_HARNESS__TORCH__CONTEXT_LENGTH": "77", "NEURON_HARNESS__TORCH__MAX_SEQUENCES": "7"}
    torch = read_config(None, environ, flags=parse(f"org/name {arguments}").settings()).harness.torch
    assert getattr(torch, key) == value


def test_error_for_an_invalid_value_names_the_engine_option():
    with pytest.raises(ConfigError, match=r"^--max-num-seqs: harness\.torch\.max_sequences: "):
        read_config(None, {}, flags=parse("--max-num-seqs 0").settings())


def test_model_options_on_the_command_line_set_keys_of_default_models():
    flags = parse("org/name --quantization q4k --tool-call-parser qwen3_coder")
    assert flags.model_settings() == {"quant": "q4k", "tool_parser": "qwen_xml"}


def test_option_draft_model_is_read_as_a_source_or_made_an_absolute_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert parse("org/name --draft-model org/small").model_settings() == {"draft_model": "org/small"}
    assert parse("org/name -md ./small.gguf").model_settings() == {"draft_model": f"{tmp_path}/small.gguf"}


def test_option_chat_template_must_name_an_existing_file_and_is_made_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"--chat-template: x\.jinja: no such file; name a file"):
        parse("org/name --chat-template x.jinja").model_settings()
    (tmp_path / "x.jinja").touch()
    assert parse("org/name --chat-template-file x.jinja").model_settings() == {"chat_template": f"{tmp_path}/x.jinja"}
    (tmp_path / "folder").mkdir()
    file = tmp_path / "folder" / "neuron.toml"
    file.write_text('[[default_models]]\nmodel_id = "org/name"\nchat_template = "x.jinja"\n')
    assert read_config(file, {}).default_models[0].chat_template == tmp_path / "folder" / "x.jinja"


@pytest.mark.parametrize(
    "arguments",
    [
        "--tool-call-parser own",
        "--reasoning-parser qwen3",
        "--enable-auto-tool-choice",
        "--kv-cache-dtype fp8",
        "--n-gpu-layers 99",
        "--flash-attn on",
        "--gpu-memory-utilization 0.9",
    ],
)
def test_option_of_another_server_without_the_same_effect_prints_a_note(arguments):
    (note,) = parse(arguments).notes()
    assert note.startswith(arguments.split()[0])
    assert "tool_parser" not in parse(arguments).model_settings()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("-fa", "-fa on"),
        ("-m x -fa -t 3", "-m x -fa on -t 3"),
        ("-fa off x", "-fa off x"),
        ("--flash-attn auto", "--flash-attn auto"),
        ("x", "x"),
    ],
)
def test_option_flash_attn_is_accepted_without_a_value(arguments, expected):
    assert complete_flags(arguments.split()) == expected.split()


def test_model_can_be_named_with_the_options_of_llama_server_and_vllm():
    _, bound, _ = App(default_command=serve).parse_args(
        ["-hf", "org/a:Q4_K_M", "--models", "org/b", "-m", "org/c"], exit_on_error=False, print_error=False
    )
    assert bound.arguments["model"] == ["org/a:Q4_K_M", "org/b", "org/c"]
