"""A call as `<function=NAME><parameter=KEY>VALUE</parameter></function>`."""

from helexa.neuron.parsers.json_text import argument_text
from helexa.neuron.parsers.keyed_arguments import KeyedArguments
from helexa.neuron.parsers.markers import Markers
from helexa.neuron.parsers.output import Output
from helexa.neuron.parsers.source import NotACall, Reading, Source

OPEN = "<function="
_PARAMETER, _CLOSE, _CLOSE_PARAMETER = "<parameter=", "</function>", "</parameter>"
_OPENS, _NEXT, _BRACKET = Markers([OPEN]), Markers([_PARAMETER, _CLOSE]), Markers([">"])
_VALUE_ENDS, _CLOSES_PARAMETER = Markers([_CLOSE_PARAMETER, _PARAMETER, _CLOSE]), Markers([_CLOSE_PARAMETER])


def read_function(source: Source, output: Output) -> Reading[None]:
    """Take one call. An argument is passed on when it is complete, typed by the tool's schema.

    The end tag of a parameter may be missing. One line break at either end of a value belongs to the notation.

    Raises:
        NotACall: the text is no call of a known tool.
    """
    yield from source.expect(_OPENS)
    name = yield from source.name()
    yield from source.expect(_BRACKET)
    output.check(name)
    arguments = KeyedArguments(source, output, name)
    while True:
        yield from source.space()
        if (yield from source.expect(_NEXT)) == _CLOSE:
            arguments.end()
            return
        key = yield from source.name()
        yield from source.expect(_BRACKET)
        pieces: list[str] = []
        if not (yield from source.until(_VALUE_ENDS, pieces.append)):
            raise NotACall
        yield from source.marker(_CLOSES_PARAMETER)
        value = "".join(pieces).removeprefix("\n").removesuffix("\n")
        arguments.add(key, argument_text(value, output.parameter(name, key)))
