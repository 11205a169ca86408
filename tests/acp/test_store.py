"""Journals lose nothing that was finished, whatever happens to the process or the file."""

import os
import time
from pathlib import Path

import pytest

from helexa.acp.history import (
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
from helexa.acp.store import PAGE, Chosen, Round, Spent, Store, StoreError, Title

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


def test_everything_comes_back(tmp_path: Path):
    journal = Store(tmp_path).create("one", "/w", ("/more",))
    journal.append([Round(MESSAGES[:2]), Title("a title")])
    journal.append([Chosen("e:m", "plan", "high", 0.5), Spent(5, 10, 0.25), Round(MESSAGES[2:])])

    saved = Store(tmp_path).open("one").read()

    assert tuple(saved.messages) == MESSAGES
    assert (saved.head.cwd, saved.head.directories, saved.title) == ("/w", ("/more",), "a title")
    assert (saved.chosen, saved.spent) == (Chosen("e:m", "plan", "high", 0.5), Spent(5, 10, 0.25))
    assert saved.damaged == 0


def test_a_file_cut_anywhere_keeps_all_whole_lines_and_takes_new_ones(tmp_path: Path):
    store = Store(tmp_path)
    journal = store.create("one", "/w", ())
    for number in range(4):
        journal.append([Round((UserMessage(f"u{number}", (Text("x" * 40),)),))])
    path = tmp_path / "sessions/one.jsonl"
    whole = path.read_bytes()
    head = whole.index(b"\n") + 1
    for cut in range(head, len(whole)):
        path.write_bytes(whole[:cut])
        lines = whole[:cut].count(b"\n") - 1

        journal.append([Round((UserMessage("new", (Text("after"),)),))])

        ids = [message.id for message in journal.read().messages if isinstance(message, UserMessage)]
        finished = whole[cut : cut + 1] == b"\n"  # the line was whole, only its end was cut
        assert ids == [f"u{number}" for number in range(lines + finished)] + ["new"]


def test_lines_of_other_versions_are_passed_over(tmp_path: Path):
    journal = Store(tmp_path).create("one", "/w", ())
    path = tmp_path / "sessions/one.jsonl"
    with path.open("ab") as file:
        file.write(b'{"type":"telepathy","x":1}\nnot json\n\xff\xfe\n[]\n' + b"[" * 100_000 + b"\n")
        file.write(b'{"type":"round","messages":[{"type":"user","id":"u","parts":[],"mood":"new"}]}\n')

    saved = journal.read()

    assert saved.messages == [UserMessage("u", ())]
    assert saved.damaged == 5


def test_half_characters_are_saved(tmp_path: Path):
    journal = Store(tmp_path).create("one", "/w", ())
    journal.append([Round((ToolResult("c", "bad \udcff name"),))])

    assert journal.read().messages == [ToolResult("c", "bad � name")]


def test_pages_are_newest_first_and_follow_a_cursor(tmp_path: Path):
    store = Store(tmp_path)
    now = time.time()
    for number in range(PAGE + 5):
        journal = store.create(f"s{number}", "/even" if number % 2 == 0 else "/odd", ())
        journal.append([Title(f"title {number}"), Title(f"better {number}")])
        os.utime(tmp_path / f"sessions/s{number}.jsonl", (now + number, now + number))
    (tmp_path / "sessions/junk.jsonl").write_bytes(b"junk\n")
    (tmp_path / "sessions/empty.jsonl").touch()

    first, cursor = store.page(None, None)
    second, end = store.page(None, cursor)

    ids = [line.head.id for line in [*first, *second]]
    assert ids == [f"s{number}" for number in reversed(range(PAGE + 5))]
    assert (len(first), end) == (PAGE, None)
    assert first[0].title == f"better {PAGE + 4}"
    assert all(line.head.cwd == "/odd" for line in store.page("/odd", None)[0])
    assert store.page("/nowhere", None) == ([], None)
    with pytest.raises(ValueError, match="cursor"):
        store.page(None, "nonsense!")


def test_no_id_leads_out_of_the_folder(tmp_path: Path):
    for id in ("../x", "a/b", "", "x" * 65, "a\0b", "é"):
        with pytest.raises(StoreError):
            Store(tmp_path).open(id)


def test_a_deleted_session_takes_nothing_more(tmp_path: Path):
    store = Store(tmp_path)
    journal = store.create("one", "/w", ())
    store.delete("one")
    store.delete("one")

    with pytest.raises(StoreError, match="No such file"):
        journal.append([Title("again")])
    with pytest.raises(FileNotFoundError):
        journal.read()
