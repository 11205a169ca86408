"""Qwen3-Coder and Qwen3.5: `<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`."""

from helexa.neuron.parsers.formats.function_xml import OPEN as FUNCTION
from helexa.neuron.parsers.formats.hermes import OPEN, HermesStrict


class QwenXml(HermesStrict):
    """The Hermes format, plus calls without the opening tag `<tool_call>`, which Qwen models sometimes omit."""

    name = "qwen_xml"
    openers = (OPEN, FUNCTION)
