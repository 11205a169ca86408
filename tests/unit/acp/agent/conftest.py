"""A session without a client: real tools in a temporary folder, and a scripted endpoint."""

import asyncio
import contextlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from helexa.acp.agent.context_and_compaction import Choices, Turn
from helexa.acp.agent.turn_loop_and_retries import run_turn
from helexa.acp.config import Endpoint, Settings
from helexa.acp.conversation_and_events import (
    CallChanged,
    CompactionChanged,
    Event,
    Message,
    Notice,
    StopReason,
    Text,
    TextDelta,
    UsageChanged,
    UserMessage,
)
from helexa.acp.host import LocalHost
from helexa.acp.providers.models import ModelChoice, Models
from helexa.acp.tools.permission_rules import PermissionRequest, Scope
from helexa.acp.tools.tool_and_effects import ToolContext, Verdict
from helexa.acp.tools.toolbox import open_toolbox
from scripted.endpoint import ScriptedEndpoint


@dataclass
class Stage:
    """A session that records events, and also acts as conversation, client and user.

    Attributes:
        messages: the history.
        events: all emitted events.
        permission_requests: all permission requests.
        verdict: the user's response to permission requests.
        decisions: remembered decisions, by tool and subject.
        running: set when a tool call runs.
        speaking: set when the first text was emitted.
    """

    turn: Turn
    messages: list[Message]
    events: list[Event] = field(default_factory=list)
    permission_requests: list[PermissionRequest] = field(default_factory=list)
    verdict: Verdict = "allow_once"
    decisions: dict[tuple[str, str], bool] = field(default_factory=dict)
    running: asyncio.Event = field(default_factory=asyncio.Event)
    speaking: asyncio.Event = field(default_factory=asyncio.Event)

    async def prompt(self, text: str) -> StopReason:
        """Append a user message and run a turn; return the stop reason."""
        await self.commit(UserMessage(f"u{len(self.messages)}", (Text(text),)))
        return await run_turn(self.turn)

    async def commit(self, *messages: Message) -> None:
        """Append messages to the history."""
        self.messages.extend(messages)

    async def emit(self, event: Event) -> None:
        """Record an event."""
        self.events.append(event)
        if isinstance(event, CallChanged) and event.status == "in_progress":
            self.running.set()
        if isinstance(event, TextDelta):
            self.speaking.set()

    async def request_permission(self, request: PermissionRequest) -> Verdict:
        """Record a permission request and return `verdict`."""
        self.permission_requests.append(request)
        return self.verdict

    def ruling(self, scope: Scope) -> bool | None:
        """Return the decision that `remember` stored, or None."""
        return self.decisions.get((scope.tool, scope.subject))

    def remember(self, scope: Scope, allowed: bool) -> None:
        """Store a decision."""
        self.decisions[scope.tool, scope.subject] = allowed

    @property
    def text(self) -> str:
        """The text of all answers."""
        return "".join(event.text for event in self.events if isinstance(event, TextDelta))

    @property
    def notices(self) -> list[str]:
        """The texts of all notices."""
        return [event.text for event in self.events if isinstance(event, Notice)]

    @property
    def usages(self) -> list[UsageChanged]:
        """Context usage after each round."""
        return [event for event in self.events if isinstance(event, UsageChanged)]

    @property
    def compactions(self) -> list[CompactionChanged]:
        """The states of all compactions."""
        return [event for event in self.events if isinstance(event, CompactionChanged)]

    @property
    def endings(self) -> list[tuple[str, str | None]]:
        """Status and output of each finished call."""
        ended = [event for event in self.events if isinstance(event, CallChanged)]
        return [(event.status, event.output) for event in ended if event.status in ("completed", "failed")]


@pytest.fixture
async def stage(tmp_path: Path) -> Any:
    """Return a function that opens a session on a scripted endpoint."""
    async with contextlib.AsyncExitStack() as stack:

        async def opened(
            endpoint: ScriptedEndpoint, mode: Any = "bypassPermissions", max_rounds: int = 25, **options: Any
        ) -> Stage:
            folder = tmp_path / f"project{len(list(tmp_path.iterdir()))}"
            folder.mkdir()
            settings = Settings(
                endpoints=(Endpoint(name="e", base_url=endpoint.url, default_model="scripted", **options),),
                default_endpoint="e",
                max_rounds=max_rounds,
            )
            context = ToolContext("s", folder, (folder,), tmp_path / "plans", LocalHost(), settings)
            toolbox = await open_toolbox(context)
            models = Models(settings)
            stack.push_async_callback(toolbox.close)
            stack.push_async_callback(models.close)
            await models.refresh(30)
            opened_stage, messages = Stage.__new__(Stage), []
            turn = Turn(
                settings=settings,
                messages=messages,
                commit=opened_stage.commit,
                choices=Choices(ModelChoice("e", "scripted"), mode),
                models=models,
                toolbox=toolbox,
                context=context,
                ruling=opened_stage.ruling,
                remember=opened_stage.remember,
                request_permission=opened_stage.request_permission,
                emit=opened_stage.emit,
            )
            opened_stage.__init__(turn, messages)
            return opened_stage

        yield opened
