"""Detects a tool call that repeats an earlier call of the same answer.

A small model that has to call a tool may make the same call again and again, until its output limit: the grammar of a
forced answer leaves it the choice between one more call and the end of the answer.
"""

from collections.abc import Sequence

from helexa.neuron.events import ToolCallDelta, ToolCallStart

CallEvent = ToolCallStart | ToolCallDelta


class RepeatedCalls:
    """Withholds the events of a call as long as the call may still turn out to repeat an earlier one.

    Two calls are the same if their names and the text of their arguments are.

    Attributes:
        found: the last call that ended repeats an earlier one. Its events are never returned.
    """

    def __init__(self) -> None:
        self.found = False
        self._earlier: set[tuple[str, str]] = set()
        self._name = ""
        self._arguments = ""
        self._withheld: list[CallEvent] = []

    def push(self, event: CallEvent) -> Sequence[CallEvent]:
        """Take the next event of a call; return the events that can be shown."""
        if isinstance(event, ToolCallStart):
            self._name, self._arguments = event.name, ""
            may_repeat = bool(self._earlier)
        else:
            self._arguments += event.arguments
            may_repeat = bool(self._withheld)
        self._withheld.append(event)
        return [] if may_repeat and self._may_repeat() else self.release()

    def end(self) -> Sequence[CallEvent]:
        """End the current call, if there is one; return its events that were withheld, unless it is a repetition."""
        if not self._name:
            return []
        call = (self._name, self._arguments)
        self._name = ""
        self.found = call in self._earlier
        self._earlier.add(call)
        return [] if self.found else self.release()

    def release(self) -> Sequence[CallEvent]:
        """Return what is withheld, if anything."""
        events, self._withheld = self._withheld, []
        return events

    def _may_repeat(self) -> bool:
        return any(name == self._name and text.startswith(self._arguments) for name, text in self._earlier)
