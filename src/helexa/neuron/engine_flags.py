"""Command line options of the engine, named as in vLLM and llama.cpp.

`neuron serve` applies the options directly, and `helexa up` passes them to the node that it starts.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from helexa.core.errors import UsageError
from helexa.core.model_source_ids import is_path, typed_source

if TYPE_CHECKING:
    from helexa.core.environment_variables import Keys  # imports pydantic, which `--help` does not need

DTYPES = {"half": "float16", "float": "float32"}
"""helexa's names of data types that have another name in vLLM, by vLLM's name."""

Dtype = Literal["auto", "float32", "bfloat16", "float16", "half", "float"]
Switch = Annotated[bool, Parameter(negative="")]

_TORCH = ("harness", "torch")
_8_BIT = dict.fromkeys(("int8", "fp8", "fp8_e4m3", "fp8_e5m2", "q8_0"), "int8")
_KV_DTYPES = {"auto": "auto", **_8_BIT, **dict.fromkeys(("float16", "bfloat16", "f16", "bf16"), "unquantized")}
_TOOL_PARSERS = {
    "llama4_json": "llama3_json",
    "llama4_pythonic": "pythonic",
    "qwen3_coder": "qwen_xml",
    "qwen3_xml": "qwen_xml",
    "deepseek_v3": "deepseek",
    "deepseek_v31": "deepseek",
    "ernie45": "hermes",
    "glm45": "glm",
    "glm47": "glm",
    "hunyuan_a13b": "hunyuan",
    "openai": "harmony",
    "phi4_mini_json": "phi4_mini",
}


_FLASH_ATTENTION = ("-fa", "--flash-attn")
_FLASH_VALUES = ("on", "off", "auto", "0", "1")


def complete_flags(tokens: list[str]) -> list[str]:
    """Return the arguments, with `on` inserted after a `-fa` without a value.

    llama.cpp permits its option `-fa` (`--flash-attn`) with and without a value.
    """
    completed: list[str] = []
    for place, token in enumerate(tokens):
        completed.append(token)
        if token in _FLASH_ATTENTION and tokens[place + 1 : place + 2] not in ([value] for value in _FLASH_VALUES):
            completed.append("on")
    return completed


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class EngineFlags:
    """Engine options.

    Attributes:
        device: Device on which models run: auto, cpu, mps, cuda or cuda:N.
        dtype: Data type of the computation.
        quantization: Quantization of the models on the command line, such as q4k.
        max_model_len: Context length of each request, in tokens; 0 for the model's own.
        max_num_seqs: Maximum number of requests that run at the same time.
        max_num_batched_tokens: Maximum number of tokens in one engine step.
        kv_cache_dtype: Data type of the KV cache: auto is int8 for long contexts on CPUs, except for models that lose
            too much accuracy, else as --dtype. All 8-bit types mean int8.
        enforce_eager: Do not run decode steps as CUDA graphs.
        tool_call_parser: Tool-call format of the models on the command line, else the format of the chat template.
        draft_model: Smaller model with the same vocabulary as the model on the command line, or an EAGLE-3 head of it,
            which makes its output faster on a CPU.
        chat_template: File with a Jinja template that replaces the chat template of the models on the command line.
        threads: Number of threads on a CPU; 0 for the number of cores.
        gpu_layers: 0 to run models on the CPU. helexa runs all layers on one device, so other numbers have no effect.
        flash_attn: Without effect, because helexa's attention kernels never store the attention matrix.
        gpu_memory_utilization: Without effect, because the engine takes only the memory that a model needs.
        enable_auto_tool_choice: Without effect, because helexa always parses tool calls.
        reasoning_parser: Without effect, because the chat template determines the format of reasoning.
    """

    device: str | None = None
    dtype: Dtype | None = None
    quantization: Annotated[str | None, Parameter(name=["--quantization", "--quant"])] = None
    max_model_len: Annotated[int | None, Parameter(name=["--max-model-len", "--ctx-size"])] = None
    max_num_seqs: Annotated[int | None, Parameter(name=["--max-num-seqs", "--parallel", "-np"])] = None
    max_num_batched_tokens: int | None = None
    kv_cache_dtype: (
        Literal["auto", "float16", "bfloat16", "f16", "bf16", "int8", "fp8", "fp8_e4m3", "fp8_e5m2", "q8_0"] | None
    ) = None
    enforce_eager: Switch = False
    tool_call_parser: str | None = None
    draft_model: Annotated[str | None, Parameter(name=["--draft-model", "--model-draft", "-md"])] = None
    threads: Annotated[int | None, Parameter(name=["--threads", "-t"])] = None
    gpu_layers: Annotated[str | None, Parameter(name=["--n-gpu-layers", "--gpu-layers", "-ngl"], show=False)] = None
    flash_attn: Annotated[str | None, Parameter(name=["--flash-attn", "-fa"], show=False)] = None
    gpu_memory_utilization: Annotated[float | None, Parameter(show=False)] = None
    chat_template: Annotated[Path | None, Parameter(name=["--chat-template", "--chat-template-file"])] = None
    enable_auto_tool_choice: Annotated[bool, Parameter(negative="", show=False)] = False
    reasoning_parser: Annotated[str | None, Parameter(show=False)] = None

    def settings(self) -> "dict[Keys, tuple[str, Any]]":
        """Return name and value of each given `[harness.torch]` option, by its key path."""
        return {(*_TORCH, key): (name, value) for key, name, value in self._values() if value is not None}

    def _values(self) -> Iterator[tuple[str, str, Any]]:
        yield "device", "--device", "cpu" if self.device is None and self.gpu_layers == "0" else self.device
        yield "threads", "--threads", self.threads
        yield "dtype", "--dtype", self.dtype and DTYPES.get(self.dtype, self.dtype)
        yield "context_length", "--max-model-len", self.max_model_len
        yield "max_sequences", "--max-num-seqs", self.max_num_seqs
        yield "max_step_tokens", "--max-num-batched-tokens", self.max_num_batched_tokens
        yield (
            "kv_dtype",
            "--kv-cache-dtype",
            self.kv_cache_dtype and _KV_DTYPES[self.kv_cache_dtype],
        )
        yield "graphs", "--enforce-eager", False if self.enforce_eager else None

    def model_settings(self) -> dict[str, str]:
        """Return the keys of `[[default_models]]` that the options set.

        Raises:
            UsageError: the file of the chat template does not exist.
        """
        keys = {
            "quant": self.quantization,
            "tool_parser": self._tool_parser(),
            "draft_model": self._draft_source(),
            "chat_template": self._template(),
        }
        return {key: value for key, value in keys.items() if value is not None}

    def notes(self) -> Iterator[str]:
        """Yield a line about each given option that differs from vLLM's or llama.cpp's."""
        if self.kv_cache_dtype in _8_BIT and self.kv_cache_dtype != "int8":
            yield f"--kv-cache-dtype {self.kv_cache_dtype}: helexa's 8-bit KV cache is int8"
        if self.kv_cache_dtype not in (None, "auto", *_8_BIT):
            yield f"--kv-cache-dtype {self.kv_cache_dtype}: a KV cache of 16 bits has the data type of --dtype"
        if self.tool_call_parser is not None and self._tool_parser() is None:
            yield "--tool-call-parser is ignored: helexa takes the tool-call format from the chat template"
        if self.gpu_layers is not None and (self.gpu_layers != "0" or self.device not in (None, "cpu")):
            yield "--n-gpu-layers is ignored: helexa runs all layers on one device; --device selects the device"
        if self.flash_attn is not None:
            yield "--flash-attn is not needed: helexa's attention kernels never store the attention matrix"
        if self.gpu_memory_utilization is not None:
            yield (
                "--gpu-memory-utilization is ignored: the engine takes the memory that models need; "
                "memory_limit_mb in [harness.torch] of neuron.toml limits it"
            )
        if self.enable_auto_tool_choice:
            yield "--enable-auto-tool-choice is not needed: helexa always parses tool calls"
        if self.reasoning_parser is not None:
            yield "--reasoning-parser is ignored: helexa takes the format of reasoning from the chat template"

    def _template(self) -> str | None:
        if self.chat_template is None:
            return None
        if not self.chat_template.is_file():
            raise UsageError(f"--chat-template: {self.chat_template}: no such file; name a file with a Jinja template")
        return str(self.chat_template.absolute())

    def _draft_source(self) -> str | None:
        if self.draft_model is None:
            return None
        source = typed_source(self.draft_model)
        # The path must be absolute, because the node may have another working folder than this command.
        return str(Path(source.removeprefix("file:")).expanduser().absolute()) if is_path(source) else source

    def _tool_parser(self) -> str | None:
        if self.tool_call_parser is None:
            return None
        from helexa.neuron.parsers.formats.tool_call_format import TOOL_CALL_FORMATS

        name = _TOOL_PARSERS.get(self.tool_call_parser, self.tool_call_parser)
        return name if name in (*TOOL_CALL_FORMATS, "none") else None
