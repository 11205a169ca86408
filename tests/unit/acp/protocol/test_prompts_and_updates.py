"""Conversion of events and history to protocol updates."""

import json
from importlib.metadata import version
from typing import Any

import pytest
from acp import schema

from helexa.acp.conversation_and_events import (
    AssistantMessage,
    CallChanged,
    CallStarted,
    Card,
    Cleared,
    CompactionChanged,
    CompactionDelta,
    Diff,
    Event,
    Image,
    Location,
    Notice,
    PlanChanged,
    PlanEntry,
    Summary,
    Terminal,
    Text,
    TextDelta,
    ThoughtDelta,
    TitleChanged,
    ToolCall,
    ToolResult,
    UsageChanged,
    UserMessage,
)
from helexa.acp.protocol.capabilities import ClientCapabilities
from helexa.acp.protocol.prompts_updates_and_replay import event_updates, replay

ALL = ClientCapabilities(notices=True, compactions=True)
CARD = Card(
    "Edit a.py",
    "edit",
    (Location("/w/a.py", 3), Location("/w/b.py")),
    (Diff("/w/a.py", None, "x"), Terminal("t1"), Text("said"), Image("image/png", "aGk=")),
)
EVENTS: list[Event] = [
    TextDelta("m1", "hello"),
    ThoughtDelta("m1", "hm"),
    CallStarted("c1", "edit_file", CARD, {"path": "a.py"}),
    CallChanged("c1", "completed", CARD, {"path": "a.py"}, "done"),
    CallChanged("c1", "in_progress"),
    PlanChanged((PlanEntry("read", "completed", "high"), PlanEntry("write"))),
    UsageChanged(10, 100, 0.25),
    TitleChanged("A title"),
]


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_session_updates_match_the_acp_schema(event: Event):
    (update,) = event_updates(event, ALL)

    notification = schema.SessionNotification.model_validate({"sessionId": "s", "update": update})

    dumped = notification.model_dump(mode="json", by_alias=True, exclude_none=True)["update"]
    if not version("agent-client-protocol").startswith("1."):
        update.pop("name", None)  # older models do not know a call's name
    assert dumped == update


def test_notices_are_sent_as_thoughts_to_clients_that_do_not_support_notices():
    for event in (Notice("slow", "warning"), CompactionChanged("k", "completed", summary="all")):
        (update,) = event_updates(event, ClientCapabilities())
        assert update["sessionUpdate"] == "agent_thought_chunk"
    assert event_updates(CompactionDelta("k", "x"), ClientCapabilities()) == []
    assert event_updates(UsageChanged(10, None), ALL) == []


def test_notices_and_compactions_are_sent_as_own_updates_to_clients_that_support_them():
    (notice,) = event_updates(Notice("slow", "warning"), ALL)
    (compaction,) = event_updates(CompactionChanged("k", "failed", error="no room"), ALL)

    assert notice == {"sessionUpdate": "notice", "severity": "warning", "title": "slow"}
    assert compaction == {
        "sessionUpdate": "compaction_update",
        "compactionId": "k",
        "status": "failed",
        "error": "no room",
    }


def test_replayed_history_has_the_same_updates_as_the_live_session():
    live = [
        ThoughtDelta("m1", "hm"),
        TextDelta("m1", "I edit."),
        CallStarted("c1", "edit_file", Card("Edit a.py", "edit", (), (Diff("/w/a.py", "1", "2"),)), {"path": "a.py"}),
        CallChanged("c1", "completed", output="done"),
        PlanChanged((PlanEntry("read"),)),
    ]
    call = ToolCall("c1", "edit_file", json.dumps({"path": "a.py"}))
    history = [
        UserMessage("u1", (Text("edit it"), Image("image/png", "aGk="))),
        AssistantMessage("m1", "I edit.", "hm", (call,)),
        ToolResult("c1", "done", card=live[2].card, plan=(PlanEntry("read"),)),
    ]

    updates = list(replay(history, ALL))

    assert [update["sessionUpdate"] for update in updates[:2]] == ["user_message_chunk"] * 2
    assert updates[2:] == [update for event in live for update in event_updates(event, ALL)]


def test_replayed_history_ends_unfinished_tool_calls():
    broken = [
        AssistantMessage("m1", calls=(ToolCall("c1", "bash", "{not json"),)),
        Summary("k", "all of it"),
        Cleared("x"),
        ToolResult("nobody", "lost", card=Card("Run", "execute", (), (Terminal("gone"),))),
    ]

    updates = list(replay(broken, ALL))

    statuses = {update["toolCallId"]: update["status"] for update in updates if "toolCallId" in update}
    assert statuses == {"c1": "failed", "nobody": "completed"}
    contents: list[Any] = [update["content"] for update in updates if update["sessionUpdate"] == "tool_call"]
    assert contents[0] == [{"type": "content", "content": {"type": "text", "text": "lost"}}]
