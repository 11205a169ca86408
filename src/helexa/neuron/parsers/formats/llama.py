"""Parse Llama 3's `{"name": ..., "parameters": {...}}` and `NAME.call(...)`."""

from helexa.neuron.parsers.formats.pythonic import read_keywords
from helexa.neuron.parsers.output import Output
from helexa.neuron.parsers.source import Markers, NotACall, Reading, Source
from helexa.neuron.parsers.values.json_call import read_call, read_calls, take_surplus

_TAG, _OBJECT, _METHOD = "<|python_tag|>", "{", ".call"
_TAGS, _OBJECTS, _SEMICOLON, _BRACKET = Markers([_TAG]), Markers([_OBJECT]), Markers([";"]), Markers(["("])
_JSON = Markers(["[", "```"])


class LlamaJson:
    """The Llama 3 format: JSON tool calls, separated by semicolons or white space.

    Tool calls are at the beginning of the output, or anywhere after `<|python_tag|>`. Without this tag, a JSON object
    is a tool call only if it names a tool of the request. After the tag, any tool name is accepted.

    The parser also accepts malformed JSON that `read_call` can repair, and up to three surplus braces at the end.
    """

    name = "llama3_json"
    markers = frozenset({_TAG})
    openers = (_TAG,)
    leading = (_OBJECT,)
    closers: tuple[str, ...] = ()

    def read(self, source: Source, output: Output) -> Reading[None]:
        """Parse consecutive JSON tool calls, or one call of a built-in tool."""
        tagged = yield from source.marker(_TAGS)
        yield from source.space()
        if tagged and (yield from source.upcoming(_JSON)):
            yield from read_calls(source, output)
            if source.empty:
                source.settle()
            return
        if not (yield from source.upcoming(_OBJECTS)):
            yield from _read_built_in(source, output)
            return
        while True:
            # Without the tag, the name is the only sign that the object is a call.
            yield from read_call(source, output, known=not tagged)
            yield from take_surplus(source)
            if (yield from source.marker(_SEMICOLON)):
                yield from source.space()
            if not (yield from source.upcoming(_OBJECTS)):
                if source.empty:
                    source.settle()
                return


def _read_built_in(source: Source, output: Output) -> Reading[None]:
    """Parse a call of a tool of the training, `brave_search.call(query="...")`."""
    name = yield from source.name()
    if not name.endswith(_METHOD):
        raise NotACall
    name = name.removesuffix(_METHOD)
    output.check(name)
    yield from source.expect(_BRACKET)
    yield from read_keywords(source, output, name)
