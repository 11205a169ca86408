"""Parse the tool calls of Kimi K2 and DeepSeek, marked with special tokens."""

from helexa.neuron.parsers.json_call import read_arguments, take_surplus
from helexa.neuron.parsers.output import Output
from helexa.neuron.parsers.source import Markers, Reading, Source

_FUNCTIONS = "functions."
_JSON, _LANGUAGE, _FENCE = Markers(["{", "```"]), Markers(["json"]), Markers(["```"])


class TokenCalls:
    """A format in which special tokens enclose each call and separate its parts.

    A list of calls may be enclosed in a begin token and an end token.

    Args:
        begin, end: tokens around a list.
        call, separator, call_end: tokens before, in and after a call.
        variants: other spellings of `begin` and `end`, which models write as text.
    """

    leading: tuple[str, ...] = ()

    def __init__(
        self,
        name: str,
        begin: str,
        end: str,
        call: str,
        separator: str,
        call_end: str,
        variants: tuple[str, str] | None = None,
    ) -> None:
        self.name = name
        self.markers = frozenset({begin, end, call, separator, call_end})
        begins, ends = ((begin, variants[0]), (end, variants[1])) if variants else ((begin,), (end,))
        self.openers, self.closers = (*begins, call), (*ends, call_end)
        self._call = call
        self._begins, self._calls, self._next = Markers(begins), Markers([call]), Markers([call, *ends])
        self._separators, self._call_ends = Markers([separator]), Markers([call_end])
        self._arguments_end = Markers([call_end, call, *ends, "```"])

    def read(self, source: Source, output: Output) -> Reading[None]:
        """Parse one tool call, or a list between a begin token and an end token."""
        listed = yield from source.marker(self._begins)
        if listed and listed not in self.markers:
            output.repairs.add("tag")
        yield from source.space()
        yield from source.expect(self._calls)
        yield from self._read_one(source, output)
        while listed:
            yield from source.space()
            if (yield from source.marker(self._next)) == self._call:
                yield from self._read_one(source, output)
                continue
            source.settle()
            return

    def _read_one(self, source: Source, output: Output) -> Reading[None]:
        name = yield from self._head(source)
        output.check(name)
        # Models forget the end of the code fence, and write up to three surplus braces.
        if fenced := (yield from source.marker(_FENCE)):
            yield from source.marker(_LANGUAGE)
        yield from source.space()
        yield from read_arguments(source, output, name, self._arguments_end)
        yield from take_surplus(source)
        if fenced:
            yield from source.marker(_FENCE)
            yield from source.space()
        if (yield from source.marker(self._call_ends)) or source.empty or (yield from source.upcoming(self._next)):
            source.settle()

    def _head(self, source: Source) -> Reading[str]:
        """Parse the part before the arguments, and return the tool's name."""
        raise NotImplementedError


class Kimi(TokenCalls):
    """The format of Kimi K2: `functions.NAME:INDEX` and a JSON object."""

    def _head(self, source: Source) -> Reading[str]:
        yield from source.space()
        written = yield from source.name()
        head, _, index = written.rpartition(":")
        yield from source.space()
        yield from source.expect(self._separators)
        yield from source.space()
        # The index is dropped, because helexa numbers calls itself.
        return (head if index.isdecimal() and head else written).removeprefix(_FUNCTIONS)


class DeepSeek(TokenCalls):
    """The DeepSeek format.

    A call is `function SEP NAME ```json {...} ``` END` (V3, R1) or `NAME SEP {...} END` (V3.1).
    """

    def _head(self, source: Source) -> Reading[str]:
        name = yield from source.name()
        yield from source.expect(self._separators)
        yield from source.space()
        if not ((yield from source.upcoming(_JSON)) or (yield from source.upcoming(self._arguments_end))):
            name = yield from source.name()  # the first name is the call's type
            yield from source.space()
        return name


KIMI_K2 = Kimi(
    "kimi_k2",
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    *("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    variants=("<|tool_call_section_begin|>", "<|tool_call_section_end|>"),
)
DEEPSEEK = DeepSeek(
    "deepseek",
    *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    *("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
)
