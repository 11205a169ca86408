"""Hermes and Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

from helexa.neuron.parsers.formats.function_xml import OPEN as FUNCTION
from helexa.neuron.parsers.formats.function_xml import read_function
from helexa.neuron.parsers.markers import Markers
from helexa.neuron.parsers.output import Output
from helexa.neuron.parsers.source import Reading, Source
from helexa.neuron.parsers.values.json_call import read_call, take_surplus

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_OPEN, _CLOSE, _FUNCTION = Markers([OPEN]), Markers([CLOSE]), Markers([FUNCTION])


class Hermes:
    """The Hermes format: one call between each pair of `<tool_call>` tags. Calls are JSON; models sometimes write XML
    instead.

    Tolerated errors: malformed JSON calls that `read_call` repairs, up to three surplus braces at the end, and a
    missing end tag.
    """

    name = "hermes"
    markers = frozenset({OPEN, CLOSE})
    openers: tuple[str, ...] = (OPEN,)
    leading: tuple[str, ...] = ()
    untagged = True
    """Whether the parser `read_untagged` may accept calls as plain JSON without tags."""

    def read(self, source: Source, output: Output) -> Reading[None]:
        """Parse one call, in JSON or XML; the tags may be missing."""
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
    """The Hermes format, but JSON calls in the text without `<tool_call>` tags are plain text."""

    name = "hermes_strict"
    untagged = False
