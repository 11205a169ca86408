"""Build the JSON arguments of a tool call from separate key-value pairs."""

from helexa.neuron.parsers.markers import Markers
from helexa.neuron.parsers.output import Output
from helexa.neuron.parsers.schema_types import is_text
from helexa.neuron.parsers.source import NotACall, Reading, Source
from helexa.neuron.parsers.values.json_text import argument_text, dumps


class KeyedArguments:
    """Builds the JSON arguments of a tool call from key-value pairs, and adds them to the `Output` as they arrive.

    The beginning of the tool call is added to the `Output` together with the first argument, or by `end` if the call
    has no arguments.

    Args:
        source: the model's unread text.
        output: receives the tool call.
        name: name of the tool.

    Attributes:
        begun: whether an argument was added.
    """

    def __init__(self, source: Source, output: Output, name: str) -> None:
        self.begun = False
        self._source = source
        self._output = output
        self._name = name

    def key(self, key: str) -> None:
        """Add the name of the next argument. The caller must then add its value."""
        if not self.begun:
            self._output.start(self._name)
        self._report(f"{', ' if self.begun else '{'}{dumps(key)}: ")
        self.begun = True

    def value(self, text: str) -> None:
        """Add the value of the current argument, which is the JSON text `text`."""
        self._report(text)

    def quote(self) -> None:
        """Begin or end a string value for the current argument, by adding a quotation mark."""
        self._report('"')

    def text(self, chunk: str) -> None:
        """Add text to the string that `quote` has begun. The text is escaped for JSON."""
        self._report(dumps(chunk)[1:-1])

    def end(self) -> None:
        """Mark the tool call's arguments as complete."""
        if not self.begun:
            self._output.start(self._name)
        self._report("}" if self.begun else "{}")
        self._output.end()

    def read_bare(self, key: str, ends: Markers) -> Reading[None]:
        """Parse the value of the argument `key`, which the model wrote without JSON syntax.

        The value ends at one of the markers `ends`, which is not read. The tool's schema determines the type of the
        value. The value is streamed if the schema allows strings and does not allow null. One line break at the
        beginning and one at the end of the value belong to the format and are dropped.

        Raises:
            NotACall: the output ended before one of `ends`.
        """
        self.key(key)
        schema = self._output.parameter(self._name, key)
        if is_text(schema):
            yield from self._read_text(ends)
            return
        pieces: list[str] = []
        if not (yield from self._source.until(ends, pieces.append)):
            raise NotACall
        value = "".join(pieces).removeprefix("\n").removesuffix("\n")
        self.value(argument_text(value, schema))

    def _read_text(self, ends: Markers) -> Reading[None]:
        first, held_break = True, ""  # a line break that may belong to the format

        def pass_on(chunk: str) -> None:
            nonlocal first, held_break
            chunk = held_break + (chunk.removeprefix("\n") if first else chunk)
            held_break = "\n" if chunk.endswith("\n") else ""
            first = False
            self.text(chunk.removesuffix("\n") if held_break else chunk)

        self.quote()
        if not (yield from self._source.until(ends, pass_on)):
            self.text(held_break)
            raise NotACall
        self.quote()

    def _report(self, text: str) -> None:
        self._source.settle()
        self._output.arguments(text)
