"""Parse DeepSeek's tool-call format, in which special tokens mark the beginning and end of calls."""

from helexa.neuron.parsers.markers import Markers
from helexa.neuron.parsers.output import Output
from helexa.neuron.parsers.source import Reading, Source
from helexa.neuron.parsers.values.json_call import read_arguments, take_surplus

_OPEN, _CLOSE = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _SEPARATOR, _END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_OPENS, _CALLS, _NEXT = Markers([_OPEN]), Markers([_CALL]), Markers([_CALL, _CLOSE])
_SEPARATORS, _ENDS, _ARGUMENTS = Markers([_SEPARATOR]), Markers([_END]), Markers(["{", "```"])
_LANGUAGE, _FENCE_END = Markers(["json"]), Markers(["```"])
_CALL_ENDS = Markers([_END, _CALL, _CLOSE, "```"])


class DeepSeek:
    """The DeepSeek format: `function SEP NAME ```json {...} ``` END` (V3, R1) or `NAME SEP {...} END` (V3.1).

    SEP and END are special tokens. V3 and R1 put the arguments in a code block, and V3.1 does not. A list of calls may
    be enclosed in a begin token and an end token.

    The parser accepts up to three surplus braces after the arguments, and a missing end of the code block.
    """

    name = "deepseek"
    markers = frozenset({_OPEN, _CLOSE, _CALL, _SEPARATOR, _END})
    openers = (_OPEN, _CALL)
    leading: tuple[str, ...] = ()
    closers = (_CLOSE, _END)

    def read(self, source: Source, output: Output) -> Reading[None]:
        """Parse one tool call, or a list of tool calls between a begin token and an end token."""
        framed = yield from source.marker(_OPENS)
        yield from source.space()
        yield from source.expect(_CALLS)
        yield from _read_one(source, output)
        while framed:
            yield from source.space()
            if (yield from source.marker(_NEXT)) == _CALL:
                yield from _read_one(source, output)
                continue
            source.settle()
            return


def _read_one(source: Source, output: Output) -> Reading[None]:
    name = yield from source.name()
    yield from source.expect(_SEPARATORS)
    yield from source.space()
    if not (yield from source.upcoming(_ARGUMENTS)):
        name = yield from source.name()  # the first name is the call's type
        yield from source.space()
    output.check(name)
    if fenced := (yield from source.marker(_FENCE_END)):
        yield from source.marker(_LANGUAGE)
    yield from source.space()
    yield from read_arguments(source, output, name, _CALL_ENDS)
    yield from take_surplus(source)
    if fenced:
        yield from source.marker(_FENCE_END)
        yield from source.space()
    if (yield from source.marker(_ENDS)) or source.empty or (yield from source.upcoming(_NEXT)):
        source.settle()
