"""What one turn of the agent takes: the conversation, the choices of the user, and the ports it works through."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from helexa.acp.config import Mode, Settings
from helexa.acp.events import Emit
from helexa.acp.history import Message
from helexa.acp.providers.models import Models
from helexa.acp.providers.provider import ModelChoice, ThoughtLevel
from helexa.acp.tools.tool import Ask, Grants, ToolContext

if TYPE_CHECKING:
    from helexa.acp.tools.toolbox import Toolbox


class Conversation(Protocol):
    """The history of a session, owned by the session."""

    @property
    def messages(self) -> Sequence[Message]:
        """All of it, oldest first, Summary and Cleared among them."""
        ...

    async def commit(self, *messages: Message) -> None:
        """Add messages for good: they are on the disk when this returns. All of a round go in one call."""
        ...


@dataclass(slots=True)
class Choices:
    """What the user chose; it may change while a turn runs, so each round reads it anew."""

    model: ModelChoice
    mode: Mode
    thought_level: ThoughtLevel = "default"
    temperature: float | None = None


@dataclass(frozen=True, slots=True)
class Turn:
    """All that an agent run needs.

    `helexa.acp.agent.loop.run_turn(turn) -> StopReason` runs it. The prompt is the conversation's last message, already
    committed. Rounds go on until the model calls no tool. After each round its messages are committed, then
    UsageChanged is said. An error of the endpoint that waiting does not mend is raised as ProviderError, after what
    there is of the round was committed; only ProviderError and CancelledError leave `run_turn`. When cancelled it
    commits what the round has so far, with a failed ToolResult for each call without one, so that the history stays
    valid, and lets CancelledError pass; the HTTP stream is closed by then.

    `helexa.acp.agent.compaction.compact(turn, instructions) -> bool` sums the history up on demand.
    """

    settings: Settings
    conversation: Conversation
    choices: Choices
    models: Models
    toolbox: "Toolbox"
    context: ToolContext
    grants: Grants
    ask: Ask
    emit: Emit
