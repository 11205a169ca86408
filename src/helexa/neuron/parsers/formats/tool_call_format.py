"""The interface of tool-call formats, and the detection of a model's format."""

from collections.abc import Callable
from typing import Protocol

from helexa.neuron.parsers.formats.gemma4 import Gemma4
from helexa.neuron.parsers.formats.harmony_and_muse_glimmer import Harmony, MuseGlimmer
from helexa.neuron.parsers.formats.hermes import Hermes, HermesStrict, QwenXml
from helexa.neuron.parsers.formats.kimi_and_deepseek import DEEPSEEK, KIMI_K2
from helexa.neuron.parsers.formats.llama_json_and_mistral import (
    COHERE,
    COMMAND_R,
    GRANITE,
    HUNYUAN,
    NEMOTRON,
    PHI4_MINI,
    LlamaJson,
    Mistral,
)
from helexa.neuron.parsers.formats.pythonic import LFM2, LLAMA_4, OLMO_3
from helexa.neuron.parsers.formats.tagged_calls import GLM, MINIMAX_M2, SEED_OSS
from helexa.neuron.parsers.output import Output
from helexa.neuron.parsers.source import Reading, Source


class ToolCallFormat(Protocol):
    """Parser of a tool-call format."""

    @property
    def name(self) -> str:
        """Name of the tool-call format."""
        ...

    @property
    def markers(self) -> frozenset[str]:
        """Special tokens of the format, which the detokenizer must not drop."""
        ...

    @property
    def openers(self) -> tuple[str, ...]:
        """Strings that begin a tool call anywhere in the model's output."""
        ...

    @property
    def leading(self) -> tuple[str, ...]:
        """Strings that begin a tool call only at the beginning of the model's output."""
        ...

    @property
    def closers(self) -> tuple[str, ...]:
        """Strings up to which the text of a call that cannot be parsed is dropped."""
        ...

    def read(self, source: Source, output: Output) -> Reading[None]:
        """Parse one or several tool calls, from one of `openers` or `leading` on.

        If the method reads text without calling `source.settle`, the caller returns this text as plain text.

        Raises:
            NotACall: the text is not a tool call, or the last call in `output` cannot be completed (`open_call`).
        """
        ...


# All tool-call formats by name.
TOOL_CALL_FORMATS: dict[str, ToolCallFormat] = {
    tool_call_format.name: tool_call_format
    for tool_call_format in (
        Hermes(),
        HermesStrict(),
        QwenXml(),
        LlamaJson(),
        LLAMA_4,
        Mistral(),
        DEEPSEEK,
        Harmony(),
        MuseGlimmer(),
        Gemma4(),
        COHERE,
        COMMAND_R,
        GLM,
        GRANITE,
        HUNYUAN,
        KIMI_K2,
        LFM2,
        MINIMAX_M2,
        NEMOTRON,
        OLMO_3,
        PHI4_MINI,
        SEED_OSS,
    )
}

# Strings that only templates of one format contain, the most specific first: several formats share `<tool_call>`.
_IN_TEMPLATE: tuple[tuple[str, str | None], ...] = (
    ("<|channel|>", "harmony"),
    ("<atem:function_calls>", "muse_glimmer"),
    ("<｜tool▁call▁begin｜>", "deepseek"),
    ("[TOOL_CALLS]", "mistral"),
    ("<arg_key>", "glm"),  # its templates also contain `<tool_call>`
    ("<minimax:tool_call>", "minimax_m2"),
    ("<seed:tool_call>", "seed_oss"),
    ("<|tool_call>call:", "gemma4"),
    ("<|tool_calls_section_begin|>", "kimi_k2"),
    ("<TOOLCALL>", "nemotron"),
    ("<|START_ACTION|>", "cohere"),
    ("followed by a json-formatted list of actions", "command_r"),
    ("<|tool_call_start|>", "lfm2"),
    ("<|tool_list_start|>", "lfm2"),
    ("<function_calls>", "olmo3"),
    ("<|tool|>", "phi4_mini"),
    ("functools[", "phi4_mini"),
    ("<|tool_call|>", "granite"),
    ('<tool_calls>[{"name":', "hunyuan"),
    ('<tool_calls>[{\\"name\\":', "hunyuan"),
    ("<tool_call>\\n<function=", "qwen_xml"),
    ("<tool_call>\n<function=", "qwen_xml"),
    ("</tool_calls>", None),  # a format that is not supported; its templates also contain `<tool_call>`
    ("<tool_call></tool_call>", "hermes"),
    ("<tool_call>\\n{", "hermes"),
    ("<tool_call>\n{", "hermes"),
    ('<tool_call>{"name":', "hermes"),
    ('{"name": function name, "parameters":', "llama3_json"),
    ("[func_name1(params_name1=params_value1", "pythonic"),
    ("<|python_start|>", "pythonic"),
)
# Tokens that only vocabularies of one format contain, for templates without tools.
_IN_VOCABULARY = (
    (("<|channel|>", "<|message|>", "<|call|>"), "harmony"),
    (("<|start|>", "<|message|>", "<|eom|>", "<|eot|>"), "muse_glimmer"),
    (("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"), "deepseek"),
    (("[TOOL_CALLS]",), "mistral"),
    (("<arg_key>", "<arg_value>"), "glm"),
    (("<minimax:tool_call>",), "minimax_m2"),
    (("<seed:tool_call>",), "seed_oss"),
    (("<|tool_call>", "<tool_call|>"), "gemma4"),
    (("<|tool_calls_section_begin|>",), "kimi_k2"),
    (("<TOOLCALL>",), "nemotron"),
    (("<|START_ACTION|>", "<|END_ACTION|>"), "cohere"),
    (("<|tool_call_start|>", "<|tool_call_end|>"), "lfm2"),
    (("<function_calls>", "</function_calls>"), "olmo3"),
    (("<|tool_call|>", "<|/tool_call|>"), "phi4_mini"),
    (("<|tool_call|>",), "granite"),
    (("<tool_call>", "</tool_call>"), "hermes"),
    (("<|python_start|>", "<|python_end|>"), "pythonic"),
    (("<|python_tag|>",), "llama3_json"),
)


def find_tool_call_format(is_token: Callable[[str], bool], template: str) -> ToolCallFormat | None:
    """Return the tool-call format of a model's template, or else of its vocabulary.

    None if neither contains the strings of a supported format, or if the template has an unsupported format.
    """
    for sign, name in _IN_TEMPLATE:
        if sign in template:
            return TOOL_CALL_FORMATS[name] if name else None
    for signs, name in _IN_VOCABULARY:
        if all(map(is_token, signs)):
            return TOOL_CALL_FORMATS[name]
    return None
