"""Build a call's JSON arguments from separate key-value pairs."""

from helexa.neuron.parsers.markers import Markers
from helexa.neuron.parsers.output import Output
from helexa.neuron.parsers.schema_types import is_text
from helexa.neuron.parsers.source import NotACall, Reading, Source
from helexa.neuron.parsers.values.json_text import argument_text, dumps


class KeyedArguments:
    """Builds the JSON text of a call's arguments from key-value pairs, and reports the text while the pairs arrive.

    The call is reported with its first argument; a call without arguments is reported when it ends.

    Args:
        source: the model's unread text.
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
        """Begin an argument with the name `key`. The caller must then add its value."""
        if not self.begun:
            self._output.start(self._name)
        self._report(f"{', ' if self.begun else '{'}{dumps(key)}: ")
        self.begun = True

    def value(self, text: str) -> None:
        """Add the current argument's value as JSON text."""
        self._report(text)

    def quote(self) -> None:
        """Begin or end a string as the current argument's value."""
        self._report('"')

    def text(self, chunk: str) -> None:
        """Add text to the string that `quote` has begun."""
        self._report(dumps(chunk)[1:-1])

    def end(self) -> None:
        """End the call's arguments."""
        if not self.begun:
            self._output.start(self._name)
        self._report("}" if self.begun else "{}")
        self._output.end()

    def read_bare(self, key: str, ends: Markers) -> Reading[None]:
        """Parse the value of the argument `key`, written without JSON syntax, up to one of the markers `ends`, which is
        left unread.

        The tool's schema determines the type of the value.

        A value whose schema allows only strings is streamed. One line break at the beginning and one at the end of the
        value belong to the format and are dropped.

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
