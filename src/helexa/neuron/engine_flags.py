"""Command line options of the engine, with the names that vLLM and llama.cpp use. Each option sets a configuration key.

`neuron serve` applies the options directly, and `helexa up` passes them to the node that it starts.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

if TYPE_CHECKING:
    from helexa.core.variables import Keys  # imports pydantic, which `--help` does not need

DTYPES = {"half": "float16", "float": "float32"}
"""Names of vLLM for data types, and helexa's names."""

Dtype = Literal["auto", "float32", "bfloat16", "float16", "half", "float"]
Switch = Annotated[bool, Parameter(negative="")]

_TORCH = ("harness", "torch")
_8_BIT = dict.fromkeys(("int8", "fp8", "fp8_e4m3", "fp8_e5m2", "q8_0"), "int8")
_TOOL_PARSERS = {
    "llama4_json": "llama3_json",
    "llama4_pythonic": "pythonic",
    "qwen3_coder": "qwen_xml",
    "qwen3_xml": "qwen_xml",
    "deepseek_v3": "deepseek",
    "openai": "harmony",
}


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
        kv_cache_dtype: Data type of the KV cache: auto is the data type of the computation. All 8-bit types mean int8.
        enforce_eager: Do not run decode steps as CUDA graphs.
        tool_call_parser: Tool-call format of the models on the command line, else the format of the chat template.
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
    enable_auto_tool_choice: Annotated[bool, Parameter(negative="", show=False)] = False
    reasoning_parser: Annotated[str | None, Parameter(show=False)] = None

    def settings(self) -> "dict[Keys, tuple[str, Any]]":
        """Return the option's name and the value for each key of neuron.toml that an option sets."""
        return {(*_TORCH, key): (name, value) for key, name, value in self._values() if value is not None}

    def _values(self) -> Iterator[tuple[str, str, Any]]:
        yield "device", "--device", self.device
        yield "dtype", "--dtype", self.dtype and DTYPES.get(self.dtype, self.dtype)
        yield "context_length", "--max-model-len", self.max_model_len
        yield "max_sequences", "--max-num-seqs", self.max_num_seqs
        yield "max_step_tokens", "--max-num-batched-tokens", self.max_num_batched_tokens
        yield (
            "kv_dtype",
            "--kv-cache-dtype",
            self.kv_cache_dtype and ("int8" if self.kv_cache_dtype in _8_BIT else "auto"),
        )
        yield "graphs", "--enforce-eager", False if self.enforce_eager else None

    def model_settings(self) -> dict[str, str]:
        """Return the keys of `[[default_models]]` that the options set for the models on the command line."""
        keys = {"quant": self.quantization, "tool_parser": self._tool_parser()}
        return {key: value for key, value in keys.items() if value is not None}

    def notes(self) -> Iterator[str]:
        """Yield a line about each option for which helexa does something else than vLLM or llama.cpp."""
        if self.kv_cache_dtype in _8_BIT and self.kv_cache_dtype != "int8":
            yield f"--kv-cache-dtype {self.kv_cache_dtype}: helexa's 8-bit KV cache is int8"
        if self.kv_cache_dtype not in (None, "auto", *_8_BIT):
            yield f"--kv-cache-dtype {self.kv_cache_dtype}: without int8, the KV cache has the data type of --dtype"
        if self.tool_call_parser is not None and self._tool_parser() is None:
            yield "--tool-call-parser is ignored: helexa takes the tool-call format from the chat template"
        if self.enable_auto_tool_choice:
            yield "--enable-auto-tool-choice is not needed: helexa always parses tool calls"
        if self.reasoning_parser is not None:
            yield "--reasoning-parser is ignored: helexa takes the format of reasoning from the chat template"

    def _tool_parser(self) -> str | None:
        if self.tool_call_parser is None:
            return None
        from helexa.neuron.parsers.formats.choice import TOOL_CALL_FORMATS

        name = _TOOL_PARSERS.get(self.tool_call_parser, self.tool_call_parser)
        return name if name in (*TOOL_CALL_FORMATS, "none") else None
