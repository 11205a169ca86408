"""Llama 3: `{"name": ..., "parameters": {...}}`, optionally after `<|python_tag|>`, and `<|python_tag|>NAME.call()`."""

from helexa.neuron.parsers.formats.pythonic import read_keywords
from helexa.neuron.parsers.markers import Markers
from helexa.neuron.parsers.output import Output
from helexa.neuron.parsers.source import NotACall, Reading, Source
from helexa.neuron.parsers.values.json_call import read_call, take_surplus

_TAG, _OBJECT, _METHOD = "<|python_tag|>", "{", ".call"
_TAGS, _OBJECTS, _SEMICOLON, _BRACKET = Markers([_TAG]), Markers([_OBJECT]), Markers([";"]), Markers(["("])


class LlamaJson:
    """The Llama 3 format: JSON calls, separated by semicolons or white space.

    Calls begin at the beginning of the answer, or anywhere after `<|python_tag|>`. Without this tag, a JSON object that
    is not a call of an offered tool is text. After the tag, any tool name is accepted.

    Tolerated errors: malformed JSON calls that `read_call` repairs, and up to three surplus braces at the end.
    """

    name = "llama3_json"
    markers = frozenset({_TAG})
    openers = (_TAG,)
    leading = (_OBJECT,)

    def read(self, source: Source, output: Output) -> Reading[None]:
        """Parse consecutive JSON calls, or one call of a tool that is built into Llama, such as
        `brave_search.call(...)`.
        """
        tagged = yield from source.marker(_TAGS)
        yield from source.space()
        if not (yield from source.upcoming(_OBJECTS)):
            yield from _read_built_in(source, output)
            return
        while True:
            yield from read_call(source, output, known=not tagged)
            yield from take_surplus(source)
            if (yield from source.marker(_SEMICOLON)):
                yield from source.space()
            if not (yield from source.upcoming(_OBJECTS)):
                if source.empty:
                    source.settle()
                return


def _read_built_in(source: Source, output: Output) -> Reading[None]:
    """Parse a call of a tool known from Llama's training, such as `brave_search.call(query="...")`."""
    name = yield from source.name()
    if not name.endswith(_METHOD):
        raise NotACall
    name = name.removesuffix(_METHOD)
    output.check(name)
    yield from source.expect(_BRACKET)
    yield from read_keywords(source, output, name)
