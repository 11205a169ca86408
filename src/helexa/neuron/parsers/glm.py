"""GLM-4.5 to 4.7: `<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>`."""

from helexa.neuron.parsers.json_text import argument_text
from helexa.neuron.parsers.keyed_arguments import KeyedArguments
from helexa.neuron.parsers.markers import Markers
from helexa.neuron.parsers.output import Output
from helexa.neuron.parsers.source import NotACall, Reading, Source

_OPEN, _CLOSE, _KEY = "<tool_call>", "</tool_call>", "<arg_key>"
_OPENS, _NEXT = Markers([_OPEN]), Markers([_KEY, _CLOSE])
_KEY_END, _VALUE, _VALUE_END = Markers(["</arg_key>"]), Markers(["<arg_value>"]), Markers(["</arg_value>"])


class Glm:
    """One call between each pair of tags. An argument is passed on when it is complete, typed by the tool's schema."""

    name = "glm"
    markers = frozenset({_OPEN, _CLOSE, _KEY, *_KEY_END.strings, *_VALUE.strings, *_VALUE_END.strings})
    openers = (_OPEN,)
    leading: tuple[str, ...] = ()

    def read(self, source: Source, output: Output) -> Reading[None]:
        """As `Family` says."""
        yield from source.marker(_OPENS)
        yield from source.space()
        name = yield from source.name()
        output.check(name)
        arguments = KeyedArguments(source, output, name)
        while True:
            yield from source.space()
            if (yield from source.expect(_NEXT)) == _CLOSE:
                arguments.end()
                return
            key = yield from _field(source, _KEY_END)
            yield from source.space()
            yield from source.expect(_VALUE)
            value = yield from _field(source, _VALUE_END)
            arguments.add(key, argument_text(value, output.parameter(name, key)))


def _field(source: Source, end: Markers) -> Reading[str]:
    """Take text up to `end`, and that."""
    pieces: list[str] = []
    if not (yield from source.until(end, pieces.append)):
        raise NotACall
    yield from source.marker(end)
    return "".join(pieces)
