"""Session logs keep all complete entries after crashes and with damaged lines."""

import os
import time
from pathlib import Path

import pytest

from helexa.acp.conversation_and_events import (
    AssistantMessage,
    Card,
    Cleared,
    Diff,
    Image,
    Location,
    PlanEntry,
    Summary,
    Text,
    ToolCall,
    ToolResult,
    UserMessage,
)
from helexa.acp.session_store import PAGE_SIZE, Round, SavedChoices, SavedUsage, Store, StoreError, Title

MESSAGES = (
    UserMessage("u", (Text("hi"), Image("image/png", "aGk=")), hidden=True),
    AssistantMessage("a", "text", "thought", (ToolCall("c", "bash", "{"),), {"anthropic-messages": [{"x": 1}]}),
    ToolResult(
        "c",
        "out",
        True,
        (Image("image/png", "aGk="),),
        Card("t", "edit", (Location("/p", 1),), (Diff("/p", None, "n"),)),
        (PlanEntry("p"),),
    ),
    Summary("s", "sum", 2),
    Cleared("x"),
)


def test_session_log_entries_are_read_back_unchanged(tmp_path: Path):
    log = Store(tmp_path).create("one", "/w", ("/more",))
    log.append([Round(MESSAGES[:2]), Title("a title")])
    log.append([SavedChoices("e:m", "plan", "high", 0.5), SavedUsage(5, 10, 0.25), Round(MESSAGES[2:])])

    saved = Store(tmp_path).open("one").read()

    assert tuple(saved.messages) == MESSAGES
    assert (saved.head.cwd, saved.head.directories, saved.title) == ("/w", ("/more",), "a title")
    assert (saved.choices, saved.usage) == (SavedChoices("e:m", "plan", "high", 0.5), SavedUsage(5, 10, 0.25))
    assert saved.unreadable_lines == 0


def test_truncated_session_log_keeps_its_complete_lines_and_accepts_new_ones(tmp_path: Path):
    store = Store(tmp_path)
    log = store.create("one", "/w", ())
    for number in range(4):
        log.append([Round((UserMessage(f"u{number}", (Text("x" * 40),)),))])
    path = tmp_path / "sessions/one.jsonl"
    content = path.read_bytes()
    head = content.index(b"\n") + 1
    for cut in range(head, len(content)):
        path.write_bytes(content[:cut])
        lines = content[:cut].count(b"\n") - 1

        log.append([Round((UserMessage("new", (Text("after"),)),))])

        ids = [message.id for message in log.read().messages if isinstance(message, UserMessage)]
        finished = content[cut : cut + 1] == b"\n"  # only the line break was cut off
        assert ids == [f"u{number}" for number in range(lines + finished)] + ["new"]


def test_unknown_lines_of_a_session_log_are_skipped(tmp_path: Path):
    log = Store(tmp_path).create("one", "/w", ())
    path = tmp_path / "sessions/one.jsonl"
    with path.open("ab") as file:
        file.write(b'{"type":"telepathy","x":1}\nnot json\n\xff\xfe\n[]\n' + b"[" * 100_000 + b"\n")
        file.write(b'{"type":"round","messages":[{"type":"user","id":"u","parts":[],"mood":"new"}]}\n')

    saved = log.read()

    assert saved.messages == [UserMessage("u", ())]
    assert saved.unreadable_lines == 5


def test_lone_surrogates_in_a_session_log_are_replaced(tmp_path: Path):
    log = Store(tmp_path).create("one", "/w", ())
    log.append([Round((ToolResult("c", "bad \udcff name"),))])

    assert log.read().messages == [ToolResult("c", "bad � name")]


def test_list_of_sessions_is_paged_newest_first(tmp_path: Path):
    store = Store(tmp_path)
    now = time.time()
    for number in range(PAGE_SIZE + 5):
        log = store.create(f"s{number}", "/even" if number % 2 == 0 else "/odd", ())
        log.append([Title(f"title {number}"), Title(f"better {number}")])
        os.utime(tmp_path / f"sessions/s{number}.jsonl", (now + number, now + number))
    (tmp_path / "sessions/junk.jsonl").write_bytes(b"junk\n")
    (tmp_path / "sessions/empty.jsonl").touch()

    first, cursor = store.page(None, None)
    second, end = store.page(None, cursor)

    ids = [entry.head.id for entry in [*first, *second]]
    assert ids == [f"s{number}" for number in reversed(range(PAGE_SIZE + 5))]
    assert (len(first), end) == (PAGE_SIZE, None)
    assert first[0].title == f"better {PAGE_SIZE + 4}"
    assert all(entry.head.cwd == "/odd" for entry in store.page("/odd", None)[0])
    assert store.page("/nowhere", None) == ([], None)
    with pytest.raises(ValueError, match="cursor"):
        store.page(None, "nonsense!")


def test_invalid_session_ids_are_rejected(tmp_path: Path):
    for id in ("../x", "a/b", "", "x" * 65, "a\0b", "é"):
        with pytest.raises(StoreError):
            Store(tmp_path).open(id)


def test_deleted_session_rejects_new_entries(tmp_path: Path):
    store = Store(tmp_path)
    log = store.create("one", "/w", ())
    store.delete("one")
    store.delete("one")

    with pytest.raises(StoreError, match="No such file"):
        log.append([Title("again")])
    with pytest.raises(FileNotFoundError):
        log.read()
