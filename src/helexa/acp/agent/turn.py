"""Inputs of one agent turn (the work on one prompt): conversation, the user's choices, and callbacks."""

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
    """The message history of a session. The agent loop reads it and appends messages to it."""

    @property
    def messages(self) -> Sequence[Message]:
        """All entries of the history, oldest first: messages, summaries and `Cleared` entries."""
        ...

    async def commit(self, *messages: Message) -> None:
        """Append messages to the history. The messages are on disk when the method returns.

        To append a model response and the results of its tool calls, pass all of them together.
        """
        ...


@dataclass(slots=True)
class Choices:
    """The user's choice of model, permission mode, reasoning effort and temperature.

    The user may change the choices while the agent works. So the agent reads them again before each model request.
    """

    model: ModelChoice
    mode: Mode
    thought_level: ThoughtLevel = "default"
    temperature: float | None = None


@dataclass(frozen=True, slots=True)
class Turn:
    """All inputs of one agent turn, which is the agent's work on one prompt.

    A turn consists of rounds. In each round, the model returns a response and the agent runs its tool calls.

    The functions that take a turn behave as follows:

    * `helexa.acp.agent.loop.run_turn(turn) -> StopReason` runs a turn. The prompt is the last message of the
      conversation and is already stored.
    * Rounds repeat until the model calls no tool. After each round, `run_turn` appends the round's messages to the
      history and emits `UsageChanged`.
    * `run_turn` raises only `ProviderError` and `CancelledError`. Before it raises, it stores the partial response.
    * On cancellation, `run_turn` closes the HTTP stream. Each call without a result gets a failed `ToolResult`,
      because the history must have a result for each call.
    * `helexa.acp.agent.compaction.compact(turn, instructions) -> bool` summarizes the history at the user's request.
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
