"""Detect the tool-call format of a model."""

from collections.abc import Callable

from helexa.neuron.parsers.formats.deepseek import DeepSeek
from helexa.neuron.parsers.formats.harmony import Harmony
from helexa.neuron.parsers.formats.hermes import Hermes, HermesStrict
from helexa.neuron.parsers.formats.llama import LlamaJson
from helexa.neuron.parsers.formats.mistral import Mistral
from helexa.neuron.parsers.formats.pythonic import Pythonic
from helexa.neuron.parsers.formats.qwen_xml import QwenXml
from helexa.neuron.parsers.formats.tool_call_format import ToolCallFormat

TOOL_CALL_FORMATS: dict[str, ToolCallFormat] = {
    tool_call_format.name: tool_call_format
    for tool_call_format in (
        Hermes(),
        HermesStrict(),
        QwenXml(),
        LlamaJson(),
        Pythonic(),
        Mistral(),
        DeepSeek(),
        Harmony(),
    )
}
"""All tool-call formats by name."""

# Strings that only templates of one format contain, the most specific first: several formats share `<tool_call>`.
_IN_TEMPLATE: tuple[tuple[str, str | None], ...] = (
    ("<|channel|>", "harmony"),
    ("<｜tool▁call▁begin｜>", "deepseek"),
    ("[TOOL_CALLS]", "mistral"),
    ("<arg_key>", None),  # GLM, whose templates also contain `<tool_call>`
    ("<tool_call>\\n<function=", "qwen_xml"),
    ("<tool_call>\n<function=", "qwen_xml"),
    ("</tool_calls>", None),  # a list of calls; templates of this format also mention `<tool_call>`
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
    (("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"), "deepseek"),
    (("[TOOL_CALLS]",), "mistral"),
    (("<tool_call>", "</tool_call>"), "hermes"),
    (("<|python_start|>", "<|python_end|>"), "pythonic"),
    (("<|python_tag|>",), "llama3_json"),
)


def find_tool_call_format(is_token: Callable[[str], bool], template: str) -> ToolCallFormat | None:
    """Return the parser of the model's tool-call format, or None if no format is detected.

    The chat template takes precedence over the vocabulary.

    Args:
        is_token: function that returns whether a text is a token of the model's vocabulary.
        template: text of the model's chat template.
    """
    for sign, name in _IN_TEMPLATE:
        if sign in template:
            return TOOL_CALL_FORMATS[name] if name else None
    for signs, name in _IN_VOCABULARY:
        if all(map(is_token, signs)):
            return TOOL_CALL_FORMATS[name]
    return None
