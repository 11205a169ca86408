"""Build a call's JSON arguments from separate key-value pairs."""

from helexa.neuron.parsers.markers import Markers
from helexa.neuron.parsers.output import Output
from helexa.neuron.parsers.schema_types import is_text
from helexa.neuron.parsers.source import NotACall, Reading, Source
from helexa.neuron.parsers.values.json_text import argument_text, dumps


class KeyedArguments:
    """Passes a call's arguments on as they arrive. The call begins at its first argument, or at its end if it has none.

    Args:
        source: text of the model.
        output: receives the call.
        name: name of the called tool.

    Attributes:
        begun: at least one argument was passed on.
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
        self._pass_on(f"{', ' if self.begun else '{'}{dumps(key)}: ")
        self.begun = True

    def value(self, text: str) -> None:
        """Add the argument's value as JSON text."""
        self._pass_on(text)

    def quote(self) -> None:
        """Begin or end a string value."""
        self._pass_on('"')

    def text(self, piece: str) -> None:
        """Add a piece of a string value."""
        self._pass_on(dumps(piece)[1:-1])

    def end(self) -> None:
        """End the arguments."""
        if not self.begun:
            self._output.start(self._name)
        self._pass_on("}" if self.begun else "{}")
        self._output.end()

    def read_bare(self, key: str, ends: Markers) -> Reading[None]:
        """Parse an argument's bare value up to one of `ends`, which is left unread. The tool's schema sets the value's
        type.

        A value whose schema allows only strings is passed on as it arrives. One line break at either end belongs to the
        format and is dropped.

        Raises:
            NotACall: the text ended first.
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
        first, held = True, ""  # a line break that may belong to the format

        def pass_on(piece: str) -> None:
            nonlocal first, held
            piece = held + (piece.removeprefix("\n") if first else piece)
            held = "\n" if piece.endswith("\n") else ""
            first = False
            self.text(piece.removesuffix("\n") if held else piece)

        self.quote()
        if not (yield from self._source.until(ends, pass_on)):
            self.text(held)
            raise NotACall
        self.quote()

    def _pass_on(self, text: str) -> None:
        self._source.settle()
        self._output.arguments(text)
