"""Arguments that come one by one, as a JSON object that grows."""

from helexa.neuron.parsers.json_text import dumps
from helexa.neuron.parsers.output import Output
from helexa.neuron.parsers.source import Source


class KeyedArguments:
    """Passes a call's arguments on, each when it is complete. The call begins with the first of them, or at its end.

    Args:
        name: the tool that is called.
    """

    def __init__(self, source: Source, output: Output, name: str) -> None:
        self._source = source
        self._output = output
        self._name = name
        self._lead = "{"

    def add(self, key: str, value: str) -> None:
        """Another argument; its value is JSON text."""
        if self._lead == "{":
            self._output.start(self._name)
        self._output.arguments(f"{self._lead}{dumps(key)}: {value}")
        self._lead = ", "
        self._source.settle()

    def end(self) -> None:
        """There are no more."""
        if self._lead == "{":
            self._output.start(self._name)
        self._output.arguments("{}" if self._lead == "{" else "}")
        self._output.end()
        self._source.settle()
