"""One open session: history, the user's choices, and the running turn."""

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from helexa.acp.agent.context_and_compaction import Choices, Turn
from helexa.acp.config import Settings
from helexa.acp.conversation_and_events import (
    Event,
    Image,
    Message,
    Notice,
    Part,
    StopReason,
    Text,
    TitleChanged,
    UsageChanged,
    UserMessage,
)
from helexa.acp.preferences import Preferences
from helexa.acp.protocol.capabilities import ClientCapabilities
from helexa.acp.protocol.editor_requests_and_always_allow import Permissions
from helexa.acp.protocol.json_rpc import INTERNAL_ERROR, RpcError, internal_error
from helexa.acp.protocol.prompts_updates_and_replay import Update, event_updates, replay
from helexa.acp.protocol.session_options import config_options
from helexa.acp.providers.models import Models
from helexa.acp.providers.requests_and_events import ProviderError
from helexa.acp.session_store import Entry, Round, SavedChoices, SavedSession, SavedUsage, SessionLog, StoreError, Title
from helexa.acp.tools.tool_and_effects import ToolContext

if TYPE_CHECKING:
    from helexa.acp.tools.toolbox import Toolbox

logger = logging.getLogger(__name__)
MAX_TITLE_CHARACTERS = 60
CANCEL_TIMEOUT_S = 5.0


class Session:
    """A session that the editor has opened.

    Updates to the editor wait until `release` is called, because the editor must first receive the session's id. Only
    the saved conversation of a loaded session is sent earlier, because the protocol requires this order.
    """

    def __init__(
        self,
        saved: SavedSession,
        session_log: SessionLog,
        choices: Choices,
        *,
        settings: Settings,
        models: Models,
        toolbox: "Toolbox",
        context: ToolContext,
        permissions: Permissions,
        preferences: Preferences,
        capabilities: ClientCapabilities,
        send: Callable[[Update], Awaitable[None]],
    ) -> None:
        self.id = saved.head.id
        self.cwd = saved.head.cwd
        self.title = saved.title
        self.choices = choices
        self.usage = saved.usage
        self.settings = settings
        self.models = models
        self.toolbox = toolbox
        self.preferences = preferences
        self.assumed = False  # whether the session's model is a default instead of a choice of the user
        self._context = context
        self.permissions = permissions  # the user's decisions about tool calls
        self._session_log = session_log
        self._messages = saved.messages
        self._capabilities = capabilities
        self._send = send
        self._released = asyncio.Event()
        self._turn: asyncio.Task[StopReason] | None = None
        self._abandoned: asyncio.Future[None] | None = None

    @property
    def busy(self) -> bool:
        """Whether the agent is working on a prompt."""
        return self._turn is not None and not self._turn.done()

    async def commit(self, *messages: Message) -> None:
        """Append messages to the history in memory and on disk.

        If the history already ends with exactly these messages, nothing is appended. If the calling task is canceled
        during the write, the write is completed first.

        Raises:
            StoreError: the messages could not be written to disk. The history in memory contains them nevertheless.
        """
        if messages and tuple(self._messages[-len(messages) :]) != messages:
            self._messages.extend(messages)
            await self._save(Round(messages))

    async def emit(self, event: Event) -> None:
        """Send an event of the agent to the editor.

        If the event has a new usage or title, first save it, which may raise StoreError. Then wait for `release`.
        """
        match event:
            case UsageChanged(used, size, cost):
                previous_cost = self.usage.cost if self.usage else None
                # The agent reports the cost of one response, and editors show the cost of the whole session.
                total = previous_cost if cost is None else (previous_cost or 0.0) + cost
                self.usage = SavedUsage(used, size, total)
                event = UsageChanged(used, size, total)
                await self._save(self.usage)
            case TitleChanged(title):
                self.title = title
                await self._save(Title(title))
            case _:
                pass
        await self.send_updates(*event_updates(event, self._capabilities))

    async def send_updates(self, *updates: Update) -> None:
        """Wait for `release`, then send `session/update` messages to the editor."""
        await self._released.wait()
        for update in updates:
            await self._send(update)

    def release(self) -> None:
        """Let `send_updates` send; called after the response with the session's id."""
        self._released.set()

    async def replay(self) -> None:
        """Send the saved conversation and its title to the editor."""
        for update in replay(self._messages, self._capabilities):
            await self._send(update)
        if self.title:
            await self._send({"sessionUpdate": "session_info_update", "title": self.title})

    def options(self) -> list[dict[str, Any]]:
        """Return the current settings as the protocol's `configOptions` list."""
        card = self.models.card(self.choices.model)
        return config_options(self.choices, self.models.listed(), card)

    async def choose(self, **changes: Any) -> None:
        """Set model, mode, thought level or temperature, and save the new values.

        Args:
            changes: new values by name: `model`, `mode`, `thought_level` or `temperature`. They are saved for the
                session and for the project, but the mode `bypassPermissions` only for the session.
        """
        for name, value in changes.items():
            setattr(self.choices, name, value)
        self.assumed = self.assumed and "model" not in changes
        chosen = SavedChoices(
            str(self.choices.model), self.choices.mode, self.choices.thought_level, self.choices.temperature
        )
        await self._save(chosen)
        remembered = {name: getattr(chosen, name) for name in changes}
        if remembered.get("mode") == "bypassPermissions":
            del remembered["mode"]  # not saved for the project, because the user must choose this mode in each session
        if remembered:
            await asyncio.to_thread(
                self.preferences.change, self.cwd, lambda known: msgspec.structs.replace(known, **remembered)
            )

    async def announce(self, commands: list[dict[str, Any]]) -> None:
        """Send the slash commands, the token usage and warnings to the editor."""
        await self.send_updates({"sessionUpdate": "available_commands_update", "availableCommands": commands})
        if self.usage is not None:
            usage = UsageChanged(self.usage.used, self.usage.size, self.usage.cost)
            await self.send_updates(*event_updates(usage, self._capabilities))
        for warning in (*self.settings.warnings, *self.toolbox.warnings):
            await self.emit(Notice(warning, "warning"))

    async def send_options(self) -> None:
        """Send the session's config options with their current values to the editor."""
        await self.send_updates({"sessionUpdate": "config_option_update", "configOptions": self.options()})

    async def send_choices(self) -> None:
        """Send the current permission mode and config options to the editor."""
        await self.send_updates({"sessionUpdate": "current_mode_update", "currentModeId": self.choices.mode})
        await self.send_options()

    async def prompt(self, work: Callable[[], Awaitable[StopReason]]) -> StopReason:
        """Run `work`, which handles a prompt, and return why it stopped.

        Only one prompt is handled at a time. Work that is still running for an earlier prompt is canceled first.

        Raises:
            RpcError: the endpoint returned no complete response, the session could not be saved, or `work` failed.
        """
        while self.busy:
            await self.cancel()
        started = time.monotonic()
        # Run the work in a separate task. `cancel` can then cancel the work and not the handler of the request, which
        # must still send the response `cancelled`.
        self._turn = turn = asyncio.ensure_future(work())
        self._abandoned = abandoned = asyncio.get_running_loop().create_future()
        try:
            # `cancel` sets `abandoned` if the turn ignores its cancellation, which must not block the session forever.
            await asyncio.wait({turn, abandoned}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            await self.cancel()
            raise
        if turn.cancelled() or not turn.done():
            logger.info("turn canceled session=%s seconds=%.1f", self.id, time.monotonic() - started)
            return "cancelled"
        match turn.exception():
            case None:
                secs = time.monotonic() - started
                logger.info("turn ended session=%s reason=%s seconds=%.1f", self.id, turn.result(), secs)
                return turn.result()
            case StoreError() as error:
                raise internal_error(str(error))
            case ProviderError() as error:
                raise RpcError(INTERNAL_ERROR, error.message, {"kind": error.kind})
            case error:
                logger.error(
                    "turn failed with an internal error session=%s; the user can send the prompt again",
                    self.id,
                    exc_info=error,
                )
                raise internal_error(f"the turn failed: {type(error).__name__}; see the log of helexa-acp")

    async def run_agent(self, parts: tuple[Part, ...]) -> StopReason:
        """As the `work` of `prompt`, append `parts` as a user message, and run the agent."""
        from helexa.acp.agent.turn_loop_and_retries import run_turn

        await self.commit(UserMessage(str(uuid.uuid4()), parts))
        if self.title is None:
            await self.emit(TitleChanged(_title(parts)))
        if self.models.card(self.choices.model).images is False and any(isinstance(part, Image) for part in parts):
            model = self.choices.model.model
            await self.emit(Notice(f"{model} sees no images and gets a note in place of each image.", "warning"))
        return await run_turn(self.turn())

    def turn(self) -> Turn:
        """Return the inputs that the agent loop needs to work on the next prompt."""
        return Turn(
            settings=self.settings,
            messages=self._messages,
            commit=self.commit,
            choices=self.choices,
            models=self.models,
            toolbox=self.toolbox,
            context=self._context,
            ruling=self.permissions.ruling,
            remember=self.permissions.remember,
            request_permission=self.permissions.request,
            emit=self.emit,
        )

    async def cancel(self) -> None:
        """Cancel the work on a prompt; wait at most `CANCEL_TIMEOUT_S` for its end.

        If the work does not end in this time, it is left alone, and the session accepts new prompts.
        """
        turn, abandoned = self._turn, self._abandoned
        if turn is None or turn.done():
            return
        turn.cancel()
        _, running = await asyncio.wait({turn}, timeout=CANCEL_TIMEOUT_S)
        if running and abandoned is not None and not abandoned.done():
            logger.error(
                "canceled turn still runs session=%s waited_secs=%g; the session accepts new prompts nevertheless",
                *(self.id, CANCEL_TIMEOUT_S),
            )
            abandoned.set_result(None)
            self._turn = None

    async def close(self) -> None:
        """Cancel the running work on a prompt, and disconnect from the MCP servers."""
        await self.cancel()
        await self.toolbox.close()

    async def _save(self, *entries: Entry) -> None:
        write = asyncio.ensure_future(asyncio.to_thread(self._session_log.append, entries))
        try:
            await asyncio.shield(write)
        except asyncio.CancelledError:
            await asyncio.wait({write})
            raise


def _title(parts: Sequence[Part]) -> str:
    text = next((part.text for part in parts if isinstance(part, Text) and part.text.strip()), "Image")
    line = " ".join(text.split())
    return line if len(line) <= MAX_TITLE_CHARACTERS else f"{line[: MAX_TITLE_CHARACTERS - 1].rstrip()}…"
