"""Arguments that come one by one, as a JSON object that grows."""

from helexa.neuron.parsers.markers import Markers
from helexa.neuron.parsers.output import Output
from helexa.neuron.parsers.schema_types import is_text
from helexa.neuron.parsers.source import NotACall, Reading, Source
from helexa.neuron.parsers.values.json_text import argument_text, dumps


class KeyedArguments:
    """Passes a call's arguments on as they come. The call begins with the first name of one, or at its end.

    Args:
        name: the tool that is called.

    Attributes:
        begun: there is an argument.
    """

    def __init__(self, source: Source, output: Output, name: str) -> None:
        self.begun = False
        self._source = source
        self._output = output
        self._name = name

    def key(self, key: str) -> None:
        """Another argument is named; its value must follow."""
        if not self.begun:
            self._output.start(self._name)
        self._pass_on(f"{', ' if self.begun else '{'}{dumps(key)}: ")
        self.begun = True

    def value(self, text: str) -> None:
        """The argument's value, as JSON text."""
        self._pass_on(text)

    def quote(self) -> None:
        """A string begins or ends, as the argument's value."""
        self._pass_on('"')

    def text(self, piece: str) -> None:
        """The string goes on."""
        self._pass_on(dumps(piece)[1:-1])

    def end(self) -> None:
        """There are no more."""
        if not self.begun:
            self._output.start(self._name)
        self._pass_on("}" if self.begun else "{}")
        self._output.end()

    def read_bare(self, key: str, ends: Markers) -> Reading[None]:
        """Take an argument's value up to what ends it, which is left unread. It is typed by the tool's schema.

        A value that is a string, whatever it says, is passed on as it comes. One line break at either end belongs to
        the notation.

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
        first, held = True, ""  # what may be the line break before the end

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
