"""Parse tool calls with one tag per argument, such as GLM's and MiniMax's."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

from helexa.neuron.parsers.json_call import read_arguments, read_calls, take_surplus
from helexa.neuron.parsers.keyed_arguments import KeyedArguments
from helexa.neuron.parsers.output import Output
from helexa.neuron.parsers.source import MAX_NAME, Markers, NotACall, Reading, Source

_MAX_SPACE = 100
_SPACE = re.compile(r"\s*")
_LINE_BEGINS = re.compile(r"(?:\A|\n)[ \t]*\Z")

_QUOTES, _QUOTED = Markers(['"', "'"]), re.compile(r"""(["'])[^"'\s]+\1""")
_JSON, _BRACE = Markers(["{", "[", "```"]), Markers(["{"])
_NAME = re.compile(r"[\w.$@-]*")
_MAX_SURPLUS = 64  # surplus braces before a closing tag


@dataclass(frozen=True)
class CallTags:
    """The tags of a tool call whose arguments are tagged.

    A call is `call NAME name_end (key KEY key_end value VALUE value_end)* call_end`.
    """

    # Texts before and after the tool's name. Both are empty in formats in which the name follows the tag around the
    # call, and ends before a parameter or white space.
    call: str
    name_end: str
    # texts before and after the name of a parameter
    key: str
    key_end: str
    value: str  # text before the value, besides white space; "" if the value follows `key_end`
    value_end: str  # text after the value
    call_end: str  # text after the last parameter; "" if the tag around the call ends the call
    block_end: str  # closing tag around one call or several calls
    # Whether each value is in lines of its own. One line break at the beginning and one at the end of a value then
    # belong to the format.
    lines: bool = False

    @property
    def inside_values(self) -> tuple[str, ...]:
        """The tags that may end a value; a value cannot contain them."""
        return tuple(filter(None, (self.value_end, self.key, self.call_end, self.block_end)))

    @cached_property
    def calls(self) -> Markers:
        """The text before a tool's name."""
        return Markers(filter(None, [self.call]))

    @cached_property
    def name_ends(self) -> Markers:
        """The text after a tool's name."""
        return Markers(filter(None, [self.name_end]))

    @cached_property
    def keys(self) -> Markers:
        """The text before the name of a parameter."""
        return Markers([self.key])

    @cached_property
    def key_ends(self) -> Markers:
        """The text after the name of a parameter."""
        return Markers([self.key_end])

    @cached_property
    def key_ends_or_line(self) -> Markers:
        """The text after a parameter's name, or a line break instead."""
        return Markers([self.key_end, "\n"])

    @cached_property
    def values(self) -> Markers:
        """The text before a value."""
        return Markers(filter(None, [self.value]))

    @cached_property
    def call_ends(self) -> Markers:
        """The tag after the last parameter."""
        return Markers(filter(None, [self.call_end]))

    @cached_property
    def ends(self) -> Markers:
        """The tags after the last parameter and around the call."""
        return Markers(filter(None, (self.call_end, self.block_end)))

    @cached_property
    def following(self) -> Markers:
        """The tags that may follow `value_end`."""
        return Markers(self.inside_values[1:])


# Tags of Qwen3-Coder, Qwen3.5 and Nemotron 3.
FUNCTION_XML = CallTags(
    "<function=", ">", "<parameter=", ">", "", "</parameter>", "</function>", "</tool_call>", lines=True
)


def read_tagged_call(source: Source, output: Output, tags: CallTags, *, known: bool) -> Reading[None]:
    """Parse one tool call, and stream its string arguments.

    The tool's schema determines the types of the arguments. The end tags of parameters and of the call may be missing,
    and a JSON object may be in the place of the parameters.

    Args:
        tags: the tags of the model's format.
        known: whether only the names of tools in the request are accepted.

    Raises:
        NotACall: the text is not a tool call. If arguments were already added to `output`, the call stays incomplete.
    """
    if tags.call:
        yield from source.expect(tags.calls)
    quote = (yield from source.marker(_QUOTES)) if tags.name_end else ""
    name = yield from source.name()
    if quote:
        yield from source.marker(_QUOTES)
    if tags.name_end:
        yield from source.expect(tags.name_ends)
    key = ""
    if not tags.name_end:
        yield from source.space()
        if (yield from source.marker(tags.key_ends)):  # the tag between the name and the first key is missing
            name, key = output.tool_and_parameter(name)
        # A word in a pair of tags, without parameters, is a call only if the request has a tool of this name.
        known |= not key and not (yield from source.upcoming(tags.keys))
    output.check(name, known=known)
    if quote:
        output.repairs.add("tag")
    yield from source.space()
    if (yield from source.upcoming(_BRACE)):
        yield from read_arguments(source, output, name, tags.ends)
        output.repairs.add("json_arguments")
        yield from take_surplus(source, _MAX_SURPLUS)
        if (yield from source.marker(tags.call_ends)):
            source.settle()
        return
    arguments = KeyedArguments(source, output, name)
    while True:
        yield from source.space()
        opened = yield from source.marker(tags.keys)
        if not (opened or key):
            # If the output ended after an argument, only end tags are missing.
            if (yield from source.upcoming(tags.ends)) or (arguments.begun and source.complete):
                yield from source.marker(tags.call_ends)
                arguments.end()
                return
            if not (yield from _is_unopened_key(source, 0, tags)):
                raise NotACall
        if not opened:
            arguments.repaired("tag")
        key = key or (yield from _read_key(source, arguments, tags))
        # The opening tag of a value may be missing, because the closing tag of the key shows where the value begins.
        if tags.value:
            yield from source.space()
            if not (yield from source.marker(tags.values)):
                arguments.repaired("tag")
        reader = _ValueReader(tags, key)
        yield from arguments.read_bare(key, reader.read, lines=tags.lines)
        if (yield from source.marker(reader.ends)) not in ("", tags.value_end):
            arguments.repaired("tag")
        source.settle()
        key = ""


def _read_key(source: Source, arguments: KeyedArguments, tags: CallTags) -> Reading[str]:
    """Read the name of a parameter and the text after the name; return the name.

    Raises:
        NotACall: the name is empty or too long, or another text follows.
    """
    text, end = yield from source.short(tags.key_ends_or_line, MAX_NAME)
    key = text
    if end == tags.key_end:
        source.take(source.at + len(end))
        if end.startswith('"'):
            key = text.partition('"')[0]  # models add attributes, such as the type
        elif _QUOTED.fullmatch(text):  # some models write names in quotation marks, as in HTML
            key = text[1:-1]
    elif end and tags.lines and _NAME.fullmatch(text):  # the value begins in the next line
        while source.at + 1 == len(source.text) and not source.ended:
            yield
        if source.text.startswith(tags.key_end, source.at + 1):
            raise NotACall
    else:
        raise NotACall
    if not key:
        raise NotACall
    if key != text or end != tags.key_end:
        arguments.repaired("tag")
    return key


def _is_unopened_key(source: Source, offset: int, tags: CallTags) -> Reading[bool]:
    """Return whether a parameter without its opening tag is `offset` characters ahead."""
    while not tags.call:  # only GLM's models omit the tag
        start = source.at + offset
        end = _NAME.match(source.text, start, start + MAX_NAME).end()  # pyright: ignore[reportOptionalMemberAccess]
        marker = tags.key_ends.at(source.text, end, source.ended)
        if marker is not None:
            return bool(marker) and end > start
        yield
    return False


class _ValueReader:
    """Reads the value of the parameter `key` up to its end tag.

    Models also end a value with a tag of the parameter's name. Such a tag ends the value if another tag of the call
    follows, and the value does not contain the opening tag of the same name.
    """

    def __init__(self, tags: CallTags, key: str) -> None:
        self._tags = tags
        self._opening, closing = f"<{key}", f"</{key}>"
        self._closing = "" if closing in tags.inside_values else closing
        self.ends = Markers(filter(None, [tags.value_end, self._closing]))  # the tags after a complete value

    def read(self, source: Source, sink: Callable[[str], None]) -> Reading[bool]:
        """Pass a value to `sink` as it arrives, up to its end tag, which is not read.

        Return whether the value has an end. False if the output ended inside the value.
        """
        line = ""  # the last characters of the value, which show whether a tag begins a line
        has_opening = False  # whether the value contains the opening tag of the parameter's name

        def pass_on(chunk: str) -> None:
            nonlocal line, has_opening
            has_opening = has_opening or self._opening in line[-len(self._opening) :] + chunk
            line = (line + chunk)[-_MAX_SPACE:]
            sink(chunk)

        # Values may contain code with tags. In a value that begins with a line break, tags of other elements count only
        # at the beginning of a line; the end tag of the value counts everywhere.
        in_lines = (yield from source.peek()) == "\n"
        tags = Markers([*self._tags.inside_values, *([self._closing] if self._closing else [])])
        while tag := (yield from source.until(tags, pass_on)):
            if tag in (self._tags.value_end, self._closing):
                # A value such as HTML may contain its own end tag. The text after a tag shows whether it is the end.
                if not (has_opening and tag == self._closing) and (yield from self._ends_value(source, tag)):
                    return True
            elif not in_lines or _LINE_BEGINS.search(line):
                return True
            pass_on(source.take(source.at + len(tag)))
        return False

    def _ends_value(self, source: Source, tag: str) -> Reading[bool]:
        """Return whether the upcoming end `tag` comes before another parameter or an end."""
        while True:
            start = source.at + len(tag)
            at = _SPACE.match(source.text, start).end()  # pyright: ignore[reportOptionalMemberAccess] - matches anything
            # None if more text is needed to decide whether one of these tags follows
            marker = self._tags.following.at(source.text, at, source.ended)
            if marker is not None or at - start > _MAX_SPACE:
                if marker or (at == len(source.text) and source.ended and tag == self._tags.value_end):
                    return True
                return (yield from _is_unopened_key(source, at - source.at, self._tags))
            yield


class TaggedCalls:
    """A format in which a pair of tags encloses calls with tagged arguments.

    The pair encloses one call or several calls. The parser also accepts JSON calls in the tags, and a missing end tag.
    In formats that write a tag before the tool's name (`CallTags.call`), the opening tag around the calls may also be
    missing, if the request offers the tool.
    """

    leading: tuple[str, ...] = ()

    def __init__(self, name: str, opener: str, tags: CallTags) -> None:
        self.name = name  # name of the format
        self.opener = opener  # opening tag around the calls
        self.tags = tags  # the other tags
        # GLM's vocabulary has these tags as special tokens, too.
        inner = () if tags.call else (tags.key, tags.key_end, tags.value, tags.value_end)
        self.markers = frozenset({opener, tags.block_end, *inner})
        self.openers = tuple(filter(None, (opener, tags.call)))
        self.closers = tuple(filter(None, (tags.block_end, tags.call_end)))
        self._opens, self._closes = Markers([opener]), Markers([tags.block_end])
        self._ends = Markers([tags.block_end, opener])

    def read(self, source: Source, output: Output) -> Reading[None]:
        """Parse the calls in one pair of tags, and add the calls to `output`."""
        opened = yield from source.marker(self._opens)
        yield from source.space()
        if opened and (yield from source.marker(self._closes)):  # an empty pair of tags is dropped
            source.settle()
            return
        if (yield from source.upcoming(_JSON)):
            yield from read_calls(source, output, self._ends)
            yield from take_surplus(source, _MAX_SURPLUS)
        else:
            yield from read_tagged_call(source, output, self.tags, known=not opened)
            yield from source.space()
            while (yield from source.upcoming(self.tags.calls)):
                yield from read_tagged_call(source, output, self.tags, known=not opened)
                yield from source.space()
        if (yield from source.marker(self._closes)):
            source.settle()


_SEED = CallTags("<function=", ">", "<parameter=", ">", "", "</parameter>", "</function>", "</seed:tool_call>")
_GLM = CallTags("", "", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "", FUNCTION_XML.block_end)
_MINIMAX = CallTags(
    *('<invoke name="', '">', '<parameter name="', '">', "", "</parameter>", "</invoke>", "</minimax:tool_call>")
)
GLM = TaggedCalls("glm", "<tool_call>", _GLM)
SEED_OSS = TaggedCalls("seed_oss", "<seed:tool_call>", _SEED)
MINIMAX_M2 = TaggedCalls("minimax_m2", "<minimax:tool_call>", _MINIMAX)
# The format of Claude. No model that helexa serves has this format, but prompts of agents mention it, and models then
# write it.
INVOKE = TaggedCalls("invoke", "<function_calls>", replace(_MINIMAX, block_end="</function_calls>"))
