"""Parse Mistral's tool-call formats.

They are `[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]` and, since 2025, `[TOOL_CALLS]NAME[ARGS]{...}`.
"""

from helexa.neuron.parsers.output import Output
from helexa.neuron.parsers.source import Markers, Reading, Source
from helexa.neuron.parsers.values.json_call import read_arguments, read_calls, take_surplus

_OPEN, _ID, _ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_OPENS, _IDS, _HEADS = Markers([_OPEN]), Markers([_ID]), Markers([_ARGUMENTS])
_JSON, _ENDS = Markers(["[", "{", "```"]), Markers([_OPEN])


class Mistral:
    """The two Mistral formats: a list of JSON tool calls, and `NAME[ARGS]{...}`.

    Call ids that the model writes are dropped. The parser also accepts malformed JSON that `read_calls` can repair, and
    up to three surplus braces at the end.
    """

    name = "mistral"
    markers = frozenset({_OPEN, _ID, _ARGUMENTS})
    openers = (_OPEN,)
    leading: tuple[str, ...] = ()
    closers: tuple[str, ...] = ()

    def read(self, source: Source, output: Output) -> Reading[None]:
        """Parse a list of JSON tool calls, or one tool call `NAME[ARGS]{...}`."""
        yield from source.marker(_OPENS)
        yield from source.space()
        if (yield from source.upcoming(_JSON)):
            yield from read_calls(source, output, _ENDS)
            if (yield from source.upcoming(_OPENS)) or source.empty:
                source.settle()
        else:
            yield from _read_named(source, output)


def _read_named(source: Source, output: Output) -> Reading[None]:
    name = yield from source.name()
    output.check(name)
    yield from source.space()
    # The server gives calls ids of its own.
    if (yield from source.marker(_IDS)):
        yield from source.name()
    yield from source.marker(_HEADS)
    yield from source.space()
    yield from read_arguments(source, output, name, _ENDS)
    yield from take_surplus(source)
    if (yield from source.upcoming(_OPENS)) or source.empty:
        source.settle()
