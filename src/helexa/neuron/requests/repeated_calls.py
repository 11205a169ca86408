"""Detect a tool call that repeats an earlier tool call of the same answer.

If a request forces tool calls, the grammar allows only a further call or the end of the answer. A small model may then
repeat the same call until it reaches the output limit.
"""

from collections.abc import Sequence

from helexa.neuron.events import ToolCallDelta, ToolCallStart

CallEvent = ToolCallStart | ToolCallDelta


class RepeatedCalls:
    """Removes tool calls that repeat an earlier call of the same answer from the event stream.

    The events of a call are withheld as long as the call may still turn out to be a repetition. A call is a repetition
    if its tool name and the text of its arguments equal those of an earlier call.

    Attributes:
        repeated: whether the last completed call is a repetition. The events of a repetition are never returned.
    """

    def __init__(self) -> None:
        self.repeated = False
        self._earlier: set[tuple[str, str]] = set()
        self._name = ""
        self._arguments: list[str] = []
        self._length = 0  # of the arguments
        self._candidates: list[str] = []  # arguments of earlier calls of the same tool that begin like this call's
        self._withheld: list[CallEvent] = []

    def push(self, event: CallEvent) -> Sequence[CallEvent]:
        """Add the next event of a tool call. Return the events to report now; none if they are withheld."""
        if isinstance(event, ToolCallStart):
            self._name, self._arguments, self._length = event.name, [], 0
            self._candidates = [arguments for name, arguments in self._earlier if name == event.name]
        else:
            self._candidates = [text for text in self._candidates if text.startswith(event.arguments, self._length)]
            self._arguments.append(event.arguments)
            self._length += len(event.arguments)
        self._withheld.append(event)
        return [] if self._candidates else self.release()

    def end(self) -> Sequence[CallEvent]:
        """Complete the current call, if there is one. Return its withheld events, or none if it is a repetition."""
        if not self._name:
            return []
        call = (self._name, "".join(self._arguments))
        self._name = ""
        self.repeated = call in self._earlier
        self._earlier.add(call)
        return [] if self.repeated else self.release()

    def release(self) -> Sequence[CallEvent]:
        """Return the withheld events of the current call and remove them from this object."""
        events, self._withheld = self._withheld, []
        return events
