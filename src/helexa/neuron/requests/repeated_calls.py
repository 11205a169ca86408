"""Detect a tool call that repeats an earlier call of the same answer.

A small model that must call a tool may repeat the same call until its output limit: the grammar of a forced call allows
only a further call or the end of the answer.
"""

from collections.abc import Sequence

from helexa.neuron.events import ToolCallDelta, ToolCallStart

CallEvent = ToolCallStart | ToolCallDelta


class RepeatedCalls:
    """Withholds the events of a tool call as long as its text is the beginning of an earlier call of the same answer.

    Two calls are equal if their names and the text of their arguments are equal.

    Attributes:
        repeated: whether the last call that ended repeats an earlier call. The events of such a call are never
            returned.
    """

    def __init__(self) -> None:
        self.repeated = False
        self._earlier: set[tuple[str, str]] = set()
        self._name = ""
        self._arguments = ""
        self._withheld: list[CallEvent] = []

    def push(self, event: CallEvent) -> Sequence[CallEvent]:
        """Add the next event of a call. Return the events to report now."""
        if isinstance(event, ToolCallStart):
            self._name, self._arguments = event.name, ""
            may_repeat = bool(self._earlier)
        else:
            self._arguments += event.arguments
            may_repeat = bool(self._withheld)
        self._withheld.append(event)
        return [] if may_repeat and self._may_repeat() else self.release()

    def end(self) -> Sequence[CallEvent]:
        """End the current call, if there is one. Return its withheld events, or none if the call repeats an earlier

        Return its withheld events, or none if the call repeats an earlier call.
        """
        if not self._name:
            return []
        call = (self._name, self._arguments)
        self._name = ""
        self.repeated = call in self._earlier
        self._earlier.add(call)
        return [] if self.repeated else self.release()

    def release(self) -> Sequence[CallEvent]:
        """Return the withheld events of the current call, and withhold them no longer."""
        events, self._withheld = self._withheld, []
        return events

    def _may_repeat(self) -> bool:
        return any(name == self._name and text.startswith(self._arguments) for name, text in self._earlier)
