"""Parse `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

Qwen models also use this format, which is named after Nous Research's Hermes models.
"""

from helexa.neuron.parsers.formats.tagged_calls import FUNCTION_XML, INVOKE, read_tagged_call
from helexa.neuron.parsers.json_call import read_arguments, read_calls, take_surplus
from helexa.neuron.parsers.output import Output
from helexa.neuron.parsers.source import Markers, Reading, Source

OPEN, CLOSE = "<tool_call>", "</tool_call>"
TOOLS, _TOOLS_CLOSE = "<tools>", "</tools>"
_OPEN, _TOOLS, _CLOSE = Markers([OPEN]), Markers([TOOLS]), Markers([CLOSE, _TOOLS_CLOSE])
_ENDS = Markers([CLOSE, _TOOLS_CLOSE, OPEN])
_NAMES, _NAME_ENDS, _INVOKES = Markers(["<function>"]), Markers(["</function>"]), Markers(INVOKE.openers)
_MAX_SURPLUS = 64  # surplus braces before a closing tag


class Hermes:
    """The Hermes format: each tool call is enclosed in a pair of `<tool_call>` tags.

    Tool calls are JSON objects. Models sometimes write XML instead, and the parser also accepts XML. The parser also
    accepts:

    * malformed JSON that `read_calls` can repair, several calls in a pair of tags, a missing end tag
    * a call in `<tools>` tags if it names a tool of the request, because the prompt encloses the tools in these tags
    * calls of tools of the request in Claude's format, `<invoke name="...">`
    """

    name = "hermes"
    markers = frozenset({OPEN, CLOSE})
    openers: tuple[str, ...] = (OPEN, TOOLS, *INVOKE.openers)
    leading: tuple[str, ...] = ()
    closers: tuple[str, ...] = (CLOSE, _TOOLS_CLOSE, FUNCTION_XML.call_end, INVOKE.tags.block_end)
    untagged = True  # Whether tool calls in the form of plain JSON without tags are accepted, if the caller allows this

    def read(self, source: Source, output: Output) -> Reading[None]:
        """Parse the calls in one pair of tags, which may be missing around XML."""
        in_tools = yield from source.marker(_TOOLS)
        tags = 0
        while not in_tools and (yield from source.marker(_OPEN)):  # models also repeat the opening tag
            tags += 1
            yield from source.space()
        tagged = OPEN if tags else in_tools
        yield from source.space()
        if not in_tools and tagged and (yield from source.marker(_CLOSE)):  # an empty pair of tags is dropped
            source.settle()
            return
        if tagged and source.complete and output.calls:  # an opening tag in the place of a closing tag
            source.settle()
            output.repairs.add("tag")
            return
        if (yield from source.upcoming(FUNCTION_XML.calls)):
            yield from read_tagged_call(source, output, FUNCTION_XML, known=tagged != OPEN)
        elif (yield from source.marker(_NAMES)):  # a name in tags, then a JSON object
            name = yield from source.name()
            yield from source.expect(_NAME_ENDS)
            yield from source.space()
            output.check(name, known=True)
            yield from read_arguments(source, output, name, _ENDS)
            output.repairs.add("json_arguments")
        elif (yield from source.upcoming(_INVOKES)):
            output.known_only = True
            yield from INVOKE.read(source, output)
            output.repairs.add("tag")
        else:
            yield from read_calls(source, output, _ENDS, known=tagged != OPEN)
        yield from take_surplus(source, _MAX_SURPLUS if tagged else None)
        if (yield from source.marker(_CLOSE)):
            source.settle()
        if in_tools or tags > 1:
            output.repairs.add("tag")


class HermesStrict(Hermes):
    """The Hermes format, in which JSON without `<tool_call>` tags is not a call."""

    name = "hermes_strict"
    untagged = False


class QwenXml(HermesStrict):
    """The Hermes format without the opening tag, which Qwen models sometimes omit."""

    name = "qwen_xml"
    openers = (*HermesStrict.openers, FUNCTION_XML.call)
