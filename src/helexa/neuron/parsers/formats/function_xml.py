"""Parse a tool call written as `<function=NAME><parameter=KEY>VALUE</parameter></function>`."""

from helexa.neuron.parsers.markers import Markers
from helexa.neuron.parsers.output import Output
from helexa.neuron.parsers.source import NotACall, Reading, Source
from helexa.neuron.parsers.values.keyed_arguments import KeyedArguments

OPEN = "<function="
_PARAMETER, _CLOSE, _CLOSE_PARAMETER, _CLOSE_CALL = "<parameter=", "</function>", "</parameter>", "</tool_call>"
_OPENS, _PARAMETERS, _BRACKET = Markers([OPEN]), Markers([_PARAMETER]), Markers([">"])
_CLOSES, _ENDS = Markers([_CLOSE]), Markers([_CLOSE, _CLOSE_CALL])
_VALUE_ENDS = Markers([_CLOSE_PARAMETER, _PARAMETER, _CLOSE, _CLOSE_CALL])
_CLOSES_PARAMETER = Markers([_CLOSE_PARAMETER])


def read_function(source: Source, output: Output, *, known: bool) -> Reading[None]:
    """Parse one tool call. String arguments are streamed, and other arguments are added when they are complete.

    The tool's schema determines the types of the arguments. The end tags of parameters and of the function may be
    missing. One line break at the beginning and one at the end of a value belong to the format and are dropped.

    Args:
        source: the model's unread text.
        output: receives the tool call.
        known: whether only the names of tools in the request are accepted.

    Raises:
        NotACall: the text is not a tool call. If arguments were already added to `output`, the call stays incomplete.
    """
    yield from source.expect(_OPENS)
    name = yield from source.name()
    yield from source.expect(_BRACKET)
    output.check(name, known=known)
    arguments = KeyedArguments(source, output, name)
    while True:
        yield from source.space()
        if (yield from source.marker(_PARAMETERS)):
            key = yield from source.key(">")
            yield from arguments.read_bare(key, _VALUE_ENDS)
            yield from source.marker(_CLOSES_PARAMETER)
            source.settle()
        elif (yield from source.upcoming(_ENDS)) or (arguments.begun and source.complete):
            yield from source.marker(_CLOSES)
            arguments.end()
            return
        else:
            raise NotACall
