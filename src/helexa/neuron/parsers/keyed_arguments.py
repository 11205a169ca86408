"""Build the JSON arguments of a tool call from separate key-value pairs."""

from collections.abc import Callable
from contextlib import suppress

from helexa.neuron.parsers.argument_values import argument_text, dumps
from helexa.neuron.parsers.json_schema import is_text, schema_types
from helexa.neuron.parsers.json_value_and_repair import repaired_json
from helexa.neuron.parsers.output import Output
from helexa.neuron.parsers.source import NotACall, Reading, Source


class KeyedArguments:
    """Builds the JSON arguments of a tool call from key-value pairs.

    The beginning of the tool call is added to the `Output` together with the first argument, or by `end` if the call
    has no arguments.
    """

    def __init__(self, source: Source, output: Output, name: str) -> None:
        self.begun = False  # whether an argument was added
        self._source = source  # the model's unread text
        self._output = output  # receives the tool call
        self._name = name  # name of the tool

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
        """Begin or end a string value for the current argument."""
        self._report('"')

    def text(self, chunk: str) -> None:
        """Add text to the string that `quote` has begun. The text is escaped for JSON."""
        self._report(dumps(chunk)[1:-1])

    def repaired(self, mistake: str) -> None:
        """Record the name of a mistake in the model's text that was repaired."""
        self._output.repairs.add(mistake)

    def end(self) -> None:
        """Mark the tool call's arguments as complete."""
        if not self.begun:
            self._output.start(self._name)
        self._report("}" if self.begun else "{}")
        self._output.end()

    def read_bare(
        self, key: str, read_value: Callable[[Source, Callable[[str], None]], Reading[bool]], *, lines: bool
    ) -> Reading[None]:
        """Parse the value of the argument `key`, written without JSON syntax.

        The tool's schema determines the type of the value.

        Args:
            read_value: method that passes the text of the value to a function as it arrives, and returns whether the
                value is complete.
            lines: whether one line break at the beginning and one at the end of the value belong to the format, and are
                dropped.

        Raises:
            NotACall: the value is incomplete.
        """
        self.key(key)
        schema = self._output.parameter(self._name, key)
        # A value that is always a string can be streamed. Other values are converted, which requires their whole text.
        if is_text(schema):
            yield from self._read_text(read_value, lines)
            return
        pieces: list[str] = []
        if not (yield from read_value(self._source, pieces.append)):
            raise NotACall
        value = "".join(pieces)
        if lines:
            value = value.removeprefix("\n").removesuffix("\n")
        if schema_types(schema) and value.lstrip()[:1] in ("{", "["):
            with suppress(NotACall):  # a value that cannot be repaired becomes a string
                repaired = repaired_json(value, schema)
                if repaired != value:
                    self.repaired("value")
                value = repaired
        self.value(argument_text(value, schema))

    def _read_text(
        self, read_value: Callable[[Source, Callable[[str], None]], Reading[bool]], lines: bool
    ) -> Reading[None]:
        first, held_break = True, ""  # `held_break`: a line break that is dropped if the value ends after it

        def pass_on(chunk: str) -> None:
            nonlocal first, held_break
            chunk = held_break + (chunk.removeprefix("\n") if first else chunk)
            held_break = "\n" if chunk.endswith("\n") else ""
            first = False
            self.text(chunk.removesuffix("\n") if held_break else chunk)

        self.quote()
        if not (yield from read_value(self._source, pass_on if lines else self.text)):
            raise NotACall
        self.quote()

    def _report(self, text: str) -> None:
        self._source.settle()
        self._output.arguments(text)
