"""Parse formats in which each tool call is a JSON object.

* A marker and a list of calls: Cohere, Command R, Granite 3, Hunyuan, Nemotron and Phi-4 mini (`JsonCalls`).
* Llama 3: `{"name": ..., "parameters": {...}}`, and `NAME.call(...)` for built-in tools.
* Mistral: `[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]` and, since 2025, `[TOOL_CALLS]NAME[ARGS]{...}`.
* Plain JSON without a marker, with or without a code fence. Coding models sometimes write plain JSON instead of their
  tool-call format.
"""

from helexa.neuron.parsers.formats.pythonic import read_keywords
from helexa.neuron.parsers.json_call import read_arguments, read_call, read_calls, take_surplus
from helexa.neuron.parsers.output import Output
from helexa.neuron.parsers.source import Markers, NotACall, Reading, Source

# Markers of JSON and of code fences around JSON.
_JSON = Markers(["{", "[", "```"])
_FENCE, _LANGUAGE = "```", "json"
_FENCES, _LANGUAGES = Markers([_FENCE]), Markers([_LANGUAGE])
_LIST, _LIST_END, _OBJECT, _COMMA = Markers(["["]), Markers(["]"]), Markers(["{"]), Markers([","])

_FUNCTOOLS = "functools"

# Strings that may begin an untagged tool call at the beginning of the output.
LEADING = ("{", "[", _FENCE)
# Strings that may begin an untagged tool call later in the output, where it must be at the beginning of a line.
LINES = tuple(f"\n{opener}" for opener in LEADING)
_LINE = Markers(["\n"])

_PYTHON_TAG, _METHOD = "<|python_tag|>", ".call"
_PYTHON_TAGS, _LIST_OR_FENCE = Markers([_PYTHON_TAG]), Markers(["[", "```"])
_OBJECT_IN_FENCE = ("```json\n{", "```\n{")
_FENCE_BEFORE_OBJECT = Markers(fence.removesuffix("{") for fence in _OBJECT_IN_FENCE)
_SEMICOLON, _BRACKET = Markers([";"]), Markers(["("])

_TOOL_CALLS, _CALL_ID, _ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_TOOL_CALLS_MARKS, _CALL_IDS, _ARGS_MARKS = Markers([_TOOL_CALLS]), Markers([_CALL_ID]), Markers([_ARGS])


class JsonCalls:
    """A format in which a marker begins a list of JSON calls.

    The list is `[{"name": ..., "arguments": {...}}, ...]`. The parser also accepts calls without the list, malformed
    JSON that `read_calls` can repair, and a missing end marker.

    Args:
        functools: whether `functools[` may begin a list of calls, too.
        name_key: key of the tool's name.
        known: whether only the names of tools in the request are accepted, because the marker may begin ordinary text.
        in_fence: whether a code fence encloses the list.
    """

    leading: tuple[str, ...] = ()

    def __init__(
        self,
        name: str,
        opener: str,
        closer: str = "",
        *,
        functools: bool = False,
        name_key: str = "name",
        known: bool = False,
        in_fence: bool = False,
    ) -> None:
        self.name = name
        self._in_fence = in_fence
        self._name_key = name_key
        self._known = known
        self.opener, self.closer = opener, closer
        self.markers = frozenset(filter(None, (opener, closer)))
        self.openers = (opener, f"{_FUNCTOOLS}[") if functools else (opener,)
        self.closers = tuple(filter(None, (closer,)))
        self._opens, self._closes = Markers((opener, _FUNCTOOLS) if functools else (opener,)), Markers(self.closers)
        self._ends = Markers((*self.closers, opener))

    def read(self, source: Source, output: Output) -> Reading[None]:
        """Parse one list of calls, and add the calls to `output`."""
        yield from source.expect(self._opens)
        yield from source.space()
        if self.closer and (yield from source.marker(self._closes)):  # an empty pair of markers is dropped
            source.settle()
            return
        # A marker without JSON after it is text, because text may mention the marker.
        if not (yield from source.upcoming(_JSON)):
            raise NotACall
        yield from read_calls(
            source,
            output,
            self._ends,
            known=self._known,
            name_key=self._name_key,
            in_list=True,
            in_fence=self._in_fence,
        )
        yield from take_surplus(source)
        if (yield from source.marker(self._closes)) or source.empty or (yield from source.upcoming(self._opens)):
            source.settle()


COHERE = JsonCalls("cohere", "<|START_ACTION|>", "<|END_ACTION|>", name_key="tool_name")
COMMAND_R = JsonCalls(
    "command_r", "Action:", name_key="tool_name", known=True, in_fence=True
)  # the models of 2024, before Command R7B
GRANITE = JsonCalls("granite", "<|tool_call|>")
PHI4_MINI = JsonCalls("phi4_mini", "<|tool_call|>", "<|/tool_call|>", functools=True)
NEMOTRON = JsonCalls("nemotron", "<TOOLCALL>", "</TOOLCALL>")
HUNYUAN = JsonCalls("hunyuan", "<tool_calls>", "</tool_calls>")


class LlamaJson:
    """The Llama 3 format: JSON tool calls, separated by semicolons or white space.

    Tool calls are at the beginning of the output, or anywhere after `<|python_tag|>`. Without this tag, a JSON object
    is a tool call only if it names a tool of the request. After the tag, any tool name is accepted.

    The parser also accepts malformed JSON that `read_call` can repair, up to three surplus braces at the end, and calls
    in a code fence.
    """

    name = "llama3_json"
    markers = frozenset({_PYTHON_TAG})
    openers = (_PYTHON_TAG,)
    leading = ("{", *_OBJECT_IN_FENCE)
    closers: tuple[str, ...] = ()

    def read(self, source: Source, output: Output) -> Reading[None]:
        """Parse consecutive JSON tool calls, or one call of a built-in tool."""
        tagged = yield from source.marker(_PYTHON_TAGS)
        fenced = not tagged and (yield from source.marker(_FENCE_BEFORE_OBJECT))
        yield from source.space()
        if tagged and (yield from source.upcoming(_LIST_OR_FENCE)):
            yield from read_calls(source, output)
            if source.empty:
                source.settle()
            return
        if not (yield from source.upcoming(_OBJECT)):
            yield from _read_built_in(source, output)
            return
        while True:
            # Without the tag, the name is the only sign that the object is a call.
            yield from read_call(source, output, known=not tagged)
            yield from take_surplus(source)
            if (yield from source.marker(_SEMICOLON)):
                yield from source.space()
            if not (yield from source.upcoming(_OBJECT)):
                if fenced:
                    output.repairs.add("code_fence")
                if (fenced and (yield from source.marker(_FENCES))) or source.empty:
                    source.settle()
                return


def _read_built_in(source: Source, output: Output) -> Reading[None]:
    """Parse a call of a tool known from training: `brave_search.call(query="...")`."""
    name = yield from source.name()
    if not name.endswith(_METHOD):
        raise NotACall
    name = name.removesuffix(_METHOD)
    output.check(name)
    yield from source.expect(_BRACKET)
    yield from read_keywords(source, output, name)


class Mistral:
    """The two Mistral formats: a list of JSON tool calls, and `NAME[ARGS]{...}`.

    Call ids that the model writes are dropped. The parser also accepts malformed JSON that `read_calls` can repair, and
    up to three surplus braces at the end.
    """

    name = "mistral"
    markers = frozenset({_TOOL_CALLS, _CALL_ID, _ARGS})
    openers = (_TOOL_CALLS,)
    leading: tuple[str, ...] = ()
    closers: tuple[str, ...] = ()

    def read(self, source: Source, output: Output) -> Reading[None]:
        """Parse a list of JSON tool calls, or one tool call `NAME[ARGS]{...}`."""
        yield from source.marker(_TOOL_CALLS_MARKS)
        yield from source.space()
        if (yield from source.upcoming(_JSON)):
            yield from read_calls(source, output, _TOOL_CALLS_MARKS, in_list=True)
            if (yield from source.upcoming(_TOOL_CALLS_MARKS)) or source.empty:
                source.settle()
        else:
            yield from _read_mistral_named(source, output)


def _read_mistral_named(source: Source, output: Output) -> Reading[None]:
    name = yield from source.name()
    output.check(name)
    yield from source.space()
    # The model's call id is dropped, because the server itself assigns ids to calls.
    if (yield from source.marker(_CALL_IDS)):
        yield from source.name()
    yield from source.marker(_ARGS_MARKS)
    yield from source.space()
    yield from read_arguments(source, output, name, _TOOL_CALLS_MARKS)
    yield from take_surplus(source)
    if (yield from source.upcoming(_TOOL_CALLS_MARKS)) or source.empty:
        source.settle()


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
        yield from _read_untagged_calls(source, output)
        yield from source.space()
        if not (yield from source.upcoming(_JSON)):
            return


def _read_untagged_calls(source: Source, output: Output) -> Reading[None]:
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
