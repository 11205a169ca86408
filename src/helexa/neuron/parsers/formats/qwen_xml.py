"""Qwen3-Coder and Qwen3.5: `<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`."""

from helexa.neuron.parsers.formats.function_xml import OPEN as FUNCTION
from helexa.neuron.parsers.formats.hermes import OPEN, HermesStrict


class QwenXml(HermesStrict):
    """As Hermes, and calls whose first tag, `<tool_call>`, is missing, which these models forget at times."""

    name = "qwen_xml"
    openers = (OPEN, FUNCTION)
