"""GLM-4.5 to 4.7: `<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>`."""

from helexa.neuron.parsers.keyed_arguments import KeyedArguments
from helexa.neuron.parsers.markers import Markers
from helexa.neuron.parsers.output import Output
from helexa.neuron.parsers.source import NotACall, Reading, Source

_OPEN, _CLOSE, _KEY, _KEY_END = "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>"
_OPENS, _CLOSES, _KEYS = Markers([_OPEN]), Markers([_CLOSE]), Markers([_KEY])
_VALUE, _VALUE_END = Markers(["<arg_value>"]), Markers(["</arg_value>"])


class Glm:
    """One call between each pair of tags, the last of which may be missing where the text ends.

    Arguments are typed by the tool's schema; strings are passed on as they come.
    """

    name = "glm"
    markers = frozenset({_OPEN, _CLOSE, _KEY, _KEY_END, *_VALUE.strings, *_VALUE_END.strings})
    openers = (_OPEN,)
    leading: tuple[str, ...] = ()

    def read(self, source: Source, output: Output) -> Reading[None]:
        """As `Family` says."""
        yield from source.marker(_OPENS)
        yield from source.space()
        if (yield from source.marker(_CLOSES)):  # an empty call is none, and no text
            source.settle()
            return
        name = yield from source.name()
        output.check(name)
        arguments = KeyedArguments(source, output, name)
        while True:
            yield from source.space()
            if (yield from source.marker(_KEYS)):
                key = yield from source.key(_KEY_END)
                yield from source.space()
                yield from source.expect(_VALUE)
                yield from arguments.read_bare(key, _VALUE_END)
                yield from source.marker(_VALUE_END)
                source.settle()
            elif (yield from source.marker(_CLOSES)) or (arguments.begun and source.complete):
                arguments.end()
                return
            else:
                raise NotACall
