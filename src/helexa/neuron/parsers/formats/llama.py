"""Llama 3: `{"name": ..., "parameters": {...}}`, `<|python_tag|>` before it or not, and `<|python_tag|>NAME.call()`."""

from helexa.neuron.parsers.formats.pythonic import read_keywords
from helexa.neuron.parsers.markers import Markers
from helexa.neuron.parsers.output import Output
from helexa.neuron.parsers.source import NotACall, Reading, Source
from helexa.neuron.parsers.values.json_call import read_call, take_surplus

_TAG, _OBJECT, _METHOD = "<|python_tag|>", "{", ".call"
_TAGS, _OBJECTS, _SEMICOLON, _BRACKET = Markers([_TAG]), Markers([_OBJECT]), Markers([";"]), Markers(["("])


class LlamaJson:
    """Calls as JSON where the answer begins, more of them after semicolons or white space, or behind the tag anywhere.

    An object that is none of a call of a known tool is an answer in JSON, and text; behind the tag any name will do.
    Repaired are those faults that `read_call` names, and up to three surplus braces at the end.
    """

    name = "llama3_json"
    markers = frozenset({_TAG})
    openers = (_TAG,)
    leading = (_OBJECT,)

    def read(self, source: Source, output: Output) -> Reading[None]:
        """As `Family` says."""
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
    """A call of one of those tools that Llama's makers trained it for, such as `brave_search.call(query="...")`."""
    name = yield from source.name()
    if not name.endswith(_METHOD):
        raise NotACall
    name = name.removesuffix(_METHOD)
    output.check(name)
    yield from source.expect(_BRACKET)
    yield from read_keywords(source, output, name)
