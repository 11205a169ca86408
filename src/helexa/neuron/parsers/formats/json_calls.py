"""Parse formats of a marker and JSON calls, such as Granite 3's and Hunyuan's."""

from helexa.neuron.parsers.output import Output
from helexa.neuron.parsers.source import Markers, NotACall, Reading, Source
from helexa.neuron.parsers.values.json_call import read_calls, take_surplus

_JSON = Markers(["{", "[", "```"])
_FUNCTOOLS, _LIST = "functools", "["


class JsonCalls:
    """A format in which a marker begins a list of JSON calls.

    The list is `[{"name": ..., "arguments": {...}}, ...]`. The parser also accepts calls without the list, malformed
    JSON that `read_calls` can repair, and a missing end marker. With `functools`, `functools[` may begin a list of
    calls, too.
    """

    leading: tuple[str, ...] = ()

    def __init__(self, name: str, opener: str, closer: str = "", *, functools: bool = False) -> None:
        self.name = name
        self.opener, self.closer = opener, closer
        self.markers = frozenset(filter(None, (opener, closer)))
        self.openers = (opener, _FUNCTOOLS + _LIST) if functools else (opener,)
        self.closers = tuple(filter(None, (closer,)))
        self._opens, self._closes = Markers((opener, _FUNCTOOLS) if functools else (opener,)), Markers(self.closers)
        self._ends = Markers((*self.closers, opener))

    def read(self, source: Source, output: Output) -> Reading[None]:
        """Parse one list of calls."""
        yield from source.expect(self._opens)
        yield from source.space()
        if self.closer and (yield from source.marker(self._closes)):  # an empty pair of markers is dropped
            source.settle()
            return
        # The marker alone may be mentioned in text.
        if not (yield from source.upcoming(_JSON)):
            raise NotACall
        yield from read_calls(source, output, self._ends)
        yield from take_surplus(source)
        if (yield from source.marker(self._closes)) or source.empty or (yield from source.upcoming(self._opens)):
            source.settle()


GRANITE = JsonCalls("granite", "<|tool_call|>")
PHI4_MINI = JsonCalls("phi4_mini", "<|tool_call|>", "<|/tool_call|>", functools=True)
NEMOTRON = JsonCalls("nemotron", "<TOOLCALL>", "</TOOLCALL>")
HUNYUAN = JsonCalls("hunyuan", "<tool_calls>", "</tool_calls>")
