"""Build a call's JSON arguments from separate key-value pairs."""

from helexa.neuron.parsers.markers import Markers
from helexa.neuron.parsers.output import Output
from helexa.neuron.parsers.schema_types import is_text
from helexa.neuron.parsers.source import NotACall, Reading, Source
from helexa.neuron.parsers.values.json_text import argument_text, dumps


class KeyedArguments:
    """Reports a call's arguments as JSON text while they arrive.

    The call starts with its first argument. A call without arguments starts when it ends.

    Args:
        source: text of the model.
        output: receives the call.
        name: name of the called tool.

    Attributes:
        begun: at least one argument was reported.
    """

    def __init__(self, source: Source, output: Output, name: str) -> None:
        self.begun = False
        self._source = source
        self._output = output
        self._name = name

    def key(self, key: str) -> None:
        """Begin an argument. Its value must follow."""
        if not self.begun:
            self._output.start(self._name)
        self._report(f"{', ' if self.begun else '{'}{dumps(key)}: ")
        self.begun = True

    def value(self, text: str) -> None:
        """Add the argument's value as JSON text."""
        self._report(text)

    def quote(self) -> None:
        """Begin or end a string value."""
        self._report('"')

    def text(self, chunk: str) -> None:
        """Add text to a string value."""
        self._report(dumps(chunk)[1:-1])

    def end(self) -> None:
        """End the arguments."""
        if not self.begun:
            self._output.start(self._name)
        self._report("}" if self.begun else "{}")
        self._output.end()

    def read_bare(self, key: str, ends: Markers) -> Reading[None]:
        """Parse an argument's bare value up to one of `ends`, which is left unread.

        The tool's schema determines the type of the value.

        A value whose schema allows only strings is streamed. One line break at either end belongs to the format and is
        dropped.

        Raises:
            NotACall: the text ended before one of `ends`.
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
