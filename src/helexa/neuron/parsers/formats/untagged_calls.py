"""Parse tool calls in plain JSON in the text, with or without a code fence.

Coding models sometimes write plain JSON instead of their tool-call format.
"""

from helexa.neuron.parsers.output import Output
from helexa.neuron.parsers.source import Markers, Reading, Source
from helexa.neuron.parsers.values.json_call import read_call, take_surplus

_FENCE, _LANGUAGE = "```", "json"
LEADING = ("{", "[", _FENCE)  # Strings that may begin an untagged tool call at the beginning of the output
# Strings that may begin an untagged tool call later in the output, where it must be at the beginning of a line.
LINES = tuple(f"\n{opener}" for opener in LEADING)

_BLOCKS, _LINE, _LANGUAGES = Markers(LEADING), Markers(["\n"]), Markers([_LANGUAGE])
_FENCES, _LIST, _OBJECT, _COMMA, _LIST_END = (Markers([text]) for text in (_FENCE, "[", "{", ",", "]"))


def read_untagged(source: Source, output: Output) -> Reading[None]:
    """Parse consecutive tool calls in plain JSON, also in a list or a code fence.

    Each call must name a tool of the request.

    Raises:
        NotACall: the text is not a tool call. `source.give_back` returns the text read so far.
    """
    # The line break before the call is text of the answer.
    if (yield from source.marker(_LINE)):
        source.settle()
        output.text("\n")
    while True:
        yield from _read_calls(source, output)
        yield from source.space()
        if not (yield from source.upcoming(_BLOCKS)):
            return


def _read_calls(source: Source, output: Output) -> Reading[None]:
    """Parse adjacent tool calls or one list of tool calls, in plain JSON.

    The calls may be enclosed in a code fence, whose end may be missing.
    """
    fenced = yield from source.marker(_FENCES)
    if fenced:
        yield from source.marker(_LANGUAGES)
        yield from source.space()
    listed = yield from source.marker(_LIST)
    has_next = True
    while has_next:
        yield from source.space()
        yield from read_call(source, output, known=True, untagged=True)
        yield from take_surplus(source)
        has_next = bool((yield from source.marker(_COMMA)) if listed else (yield from source.upcoming(_OBJECT)))
    if listed:
        yield from source.expect(_LIST_END)
        source.settle()
        yield from source.space()
    if (fenced and (yield from source.marker(_FENCES))) or source.empty:
        source.settle()
