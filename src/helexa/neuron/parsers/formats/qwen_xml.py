"""Parse the format of Qwen3-Coder and Qwen3.5, with tool calls as XML between `<tool_call>` tags.

A tool call is written as `<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`.
"""

from helexa.neuron.parsers.formats.function_xml import OPEN as FUNCTION
from helexa.neuron.parsers.formats.hermes import OPEN, TOOLS, HermesStrict


class QwenXml(HermesStrict):
    """The Hermes format, in which the opening tag `<tool_call>` may be missing. Qwen models sometimes omit this tag."""

    name = "qwen_xml"
    openers = (OPEN, TOOLS, FUNCTION)
