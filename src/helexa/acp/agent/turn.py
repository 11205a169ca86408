"""Inputs of one turn of the agent: conversation, choices of the user, and protocols for side effects."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from helexa.acp.config import Mode, Settings
from helexa.acp.events import Emit
from helexa.acp.history import Message
from helexa.acp.providers.models import Models
from helexa.acp.providers.provider import ModelChoice, ThoughtLevel
from helexa.acp.tools.tool import Grants, PermissionCallback, ToolContext

if TYPE_CHECKING:
    from helexa.acp.tools.toolbox import Toolbox


class Conversation(Protocol):
    """The message history of a session, as the agent loop reads and extends it."""

    @property
    def messages(self) -> Sequence[Message]:
        """All messages, oldest first, including the markers `Summary` (of a compaction) and `Cleared`."""
        ...

    async def commit(self, *messages: Message) -> None:
        """Append messages durably: they are on disk when the method returns.

        All messages of a round are passed in one call.
        """
        ...


@dataclass(slots=True)
class Choices:
    """The user's choices. They may change during a turn, so the agent reads them again in each round."""

    model: ModelChoice
    mode: Mode
    thought_level: ThoughtLevel = "default"
    temperature: float | None = None


@dataclass(frozen=True, slots=True)
class Turn:
    """All inputs of one turn: the agent's work on one prompt, in rounds of an answer and its tool calls.

    The functions that take a turn behave as follows:

    * `helexa.acp.agent.loop.run_turn(turn) -> StopReason` runs a turn. The prompt is the last message of the
      conversation and is already committed.
    * Rounds repeat until the model calls no tool. After each round, `run_turn` commits its messages and emits
      `UsageChanged`.
    * `run_turn` raises only `ProviderError` and `CancelledError`. Before it raises, it commits the partial round.
    * On cancellation, `run_turn` closes the HTTP stream. Each call without a result gets a failed `ToolResult`, so that
      the history stays valid.
    * `helexa.acp.agent.compaction.compact(turn, instructions) -> bool` summarizes the history on demand.
    """

    settings: Settings
    conversation: Conversation
    choices: Choices
    models: Models
    toolbox: "Toolbox"
    context: ToolContext
    grants: Grants
    request_permission: PermissionCallback
    emit: Emit
