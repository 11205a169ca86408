"""Parse the Hermes format, which Qwen models also use: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

from helexa.neuron.parsers.formats.function_xml import OPEN as FUNCTION
from helexa.neuron.parsers.formats.function_xml import read_function
from helexa.neuron.parsers.markers import Markers
from helexa.neuron.parsers.output import Output
from helexa.neuron.parsers.source import Reading, Source
from helexa.neuron.parsers.values.json_call import read_call, take_surplus

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_OPEN, _CLOSE, _FUNCTION = Markers([OPEN]), Markers([CLOSE]), Markers([FUNCTION])


class Hermes:
    """The Hermes format: each tool call is enclosed in a pair of `<tool_call>` tags.

    Tool calls are JSON objects. Models sometimes write XML instead, and the parser also accepts XML. The parser also
    accepts malformed JSON that `read_call` can repair, up to three surplus braces at the end, and a missing end tag.
    """

    name = "hermes"
    markers = frozenset({OPEN, CLOSE})
    openers: tuple[str, ...] = (OPEN,)
    leading: tuple[str, ...] = ()
    untagged = True
    """Whether tool calls in the form of plain JSON without tags are accepted, if the caller allows this."""

    def read(self, source: Source, output: Output) -> Reading[None]:
        """Parse one tool call in JSON or XML, with or without tags."""
        tagged = yield from source.marker(_OPEN)
        yield from source.space()
        if tagged and (yield from source.marker(_CLOSE)):  # an empty pair of tags is dropped
            source.settle()
            return
        if (yield from source.upcoming(_FUNCTION)):
            yield from read_function(source, output, known=not tagged)
        else:
            yield from read_call(source, output)
        yield from take_surplus(source)
        if (yield from source.marker(_CLOSE)):
            source.settle()


class HermesStrict(Hermes):
    """The Hermes format, in which JSON without `<tool_call>` tags is text and not a tool call."""

    name = "hermes_strict"
    untagged = False
