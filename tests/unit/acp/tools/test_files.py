"""read_file, write_file, edit_file and list_dir on real files."""

import base64
import os
from typing import Any

import pytest

from helexa.acp.conversation_and_events import Diff, Image, Location


async def test_file_tools_write_edit_and_read_a_file(workplace: Any) -> None:
    file = workplace.folder / "src/deep/a.py"
    written = await workplace.call("write_file", path="src/deep/a.py", content="one = 1\ntwo = 2\n")
    assert written.content == "wrote src/deep/a.py (16 bytes)"
    assert written.shown == (Diff(str(file), None, "one = 1\ntwo = 2\n"),)

    edited = await workplace.call("edit_file", path=str(file), old_text="two = 2", new_text="two = 'zwölf'")
    assert file.read_text() == "one = 1\ntwo = 'zwölf'\n"
    assert edited.shown == (Diff(str(file), "one = 1\ntwo = 2\n", "one = 1\ntwo = 'zwölf'\n"),)
    assert edited.locations == (Location(str(file), 2),)

    assert (await workplace.call("read_file", path="src/deep/a.py")).content == "one = 1\ntwo = 'zwölf'"
    assert (await workplace.call("read_file", path="src/deep/a.py", line=2, limit="1")).content == "two = 'zwölf'"
    assert (await workplace.call("read_file", path="src/deep/a.py", line=3)).content == "[the file has no line 3]"


async def test_edit_preserves_file_mode_and_line_endings(workplace: Any) -> None:
    file = workplace.folder / "run.cmd"
    file.write_bytes(b"\xef\xbb\xbfone\r\ntwo\r\nthree\r\n")
    file.chmod(0o755)
    await workplace.call("edit_file", path="run.cmd", old_text="one\ntwo", new_text="1\n2")
    assert file.read_bytes() == b"\xef\xbb\xbf1\r\n2\r\nthree\r\n"
    assert file.stat().st_mode & 0o777 == 0o755


@pytest.mark.parametrize(
    ("old_text", "expected"),
    [
        ("b = 1", "occurs 2 times in the file, at lines 2, 4"),
        ("b  =  1\nc = 2", "line 2 differs only in white space:\n    b = 1\n    c = 2"),
        ("    c = 3\nelse", "most similar to the first line of old_text is line 3:     c = 2"),
        ("nothing like it at all", "old_text is not in the file"),
        ("", "old_text is empty"),
        ("same", "old_text and new_text are the same"),
    ],
)
async def test_edit_with_missing_or_ambiguous_old_text_fails_and_changes_no_file(
    workplace: Any, old_text: str, expected: str
) -> None:
    (workplace.folder / "a.py").write_text("def f():\n    b = 1\n    c = 2\n    b = 1\n")
    before = (workplace.folder / "a.py").read_bytes()
    failure = await workplace.failure("edit_file", path="a.py", old_text=old_text, new_text="same")
    assert expected in failure
    assert (workplace.folder / "a.py").read_bytes() == before


async def test_diff_shown_for_an_edit_of_a_large_file_has_only_nearby_lines(workplace: Any) -> None:
    lines = [f"line {number}\n" for number in range(20_000)]
    (workplace.folder / "large.txt").write_text("".join(lines))
    edited = await workplace.call("edit_file", path="large.txt", old_text="line 9999\n", new_text="changed\n")
    assert edited.shown[0].old == "".join(lines[9994:10_005])
    assert edited.shown[0].new == "".join([*lines[9994:9999], "changed\n", *lines[10_000:10_005]])


async def test_long_files_and_lines_are_truncated_with_a_note(workplace: Any) -> None:
    (workplace.folder / "long.txt").write_text("".join(f"{number}\n" for number in range(1, 5001)))
    assert (await workplace.call("read_file", path="long.txt")).content.endswith(
        "2000\n[lines 1 to 2000; there are more: read from line 2001]"
    )
    (workplace.folder / "wide.txt").write_text("é" * 5_000_000)
    wide = (await workplace.call("read_file", path="wide.txt")).content
    assert wide.endswith("more bytes are left out]") and len(wide.encode()) < 65_000 and "\ufffd" not in wide
    (workplace.folder / "both.txt").write_text(f"{'x' * 40_000}\n{'y' * 40_000}\nz\n")
    assert (await workplace.call("read_file", path="both.txt")).content.endswith(
        "x\n[lines 1 to 1; there are more: read from line 2]"
    )
    with (workplace.folder / "huge.txt").open("wb") as file:
        file.truncate(64 << 20)
    assert "is larger than 16 MiB" in await workplace.failure("read_file", path="huge.txt")


async def test_read_file_rejects_files_that_are_neither_text_nor_image(workplace: Any) -> None:
    (workplace.folder / "zero.bin").write_bytes(b"a\0b")
    (workplace.folder / "latin.txt").write_bytes(b"\xe4\n")
    os.mkfifo(workplace.folder / "pipe")
    assert "NUL" in await workplace.failure("read_file", path="zero.bin")
    assert "not UTF-8 text: the byte at offset 0 is invalid; " in await workplace.failure("read_file", path="latin.txt")
    assert "is not a file" in await workplace.failure("read_file", path="pipe")
    assert "no such file" in await workplace.failure("read_file", path="absent.txt")
    assert "list_dir" in await workplace.failure("read_file", path=".")
    assert "is a folder" in await workplace.failure("write_file", path=".", content="")
    assert "is a folder" in await workplace.failure("edit_file", path=".", old_text="a", new_text="b")
    assert "cannot be written" in await workplace.failure("write_file", path="zero.bin/x", content="")
    assert "cannot be read" in await workplace.failure("read_file", path="x" * 5000)
    assert "cannot be written" in await workplace.failure("write_file", path="a.txt", content="half \ud83d of it")
    assert (await workplace.call("write_file", path="latin.txt", content="ä")).shown[0].old is None


PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


@pytest.mark.parametrize(
    ("name", "data", "media_type"),
    [
        ("shot.png", PNG, "image/png"),
        ("shot.JPG", b"\xff\xd8\xff\xe0", "image/jpeg"),
        ("really a gif.png", b"GIF89a", "image/gif"),
        ("a.webp", b"RIFF\0\0\0\0WEBPVP8 ", "image/webp"),
    ],
)
async def test_read_file_returns_an_image_file_as_an_image(
    workplace: Any, name: str, data: bytes, media_type: str
) -> None:
    (workplace.folder / name).write_bytes(data)
    outcome = await workplace.call("read_file", path=name, line=3)
    image = Image(media_type, base64.b64encode(data).decode())
    assert (outcome.images, outcome.shown, outcome.failed) == ((image,), (image,), False)
    assert outcome.content == f"[the image {name}, {len(data)} bytes]"


async def test_read_file_rejects_invalid_image_files(workplace: Any) -> None:
    (workplace.folder / "text.png").write_text("not an image")
    (workplace.folder / "large.png").write_bytes(PNG + bytes(4 << 20))
    (workplace.folder / "outside.png").symlink_to("/etc/passwd")
    assert "text.png is not a PNG, JPEG, GIF or WebP image" in await workplace.failure("read_file", path="text.png")
    assert "the limit for images is 3932160" in await workplace.failure("read_file", path="large.png")
    assert "no such file" in await workplace.failure("read_file", path="absent.png")
    assert "outside of this session's folders" in await workplace.failure("read_file", path="outside.png")
    (workplace.folder / "drawing.svg").write_text("<svg/>")
    assert (await workplace.call("read_file", path="drawing.svg")).content == "<svg/>"


async def test_list_dir_escapes_hostile_file_names(workplace: Any) -> None:
    for name in (b"plain", b"new\nline", b"\x1b[31mred", b"not-utf-8-\xff", b"rtl-\xe2\x80\xaegnp", b"-rf", b"$(rm x)"):
        (workplace.folder / os.fsdecode(name)).touch()
    (workplace.folder / "folder").mkdir()
    (workplace.folder / "link").symlink_to("/etc")
    listed = (await workplace.call("list_dir")).content.split("\n")
    assert listed == sorted(
        [
            "f $(rm x)",
            "f -rf",
            "f \\x1b[31mred",
            "d folder",
            "l link",
            "f new\\nline",
            "f not-utf-8-\\udcff",
            "f plain",
            "f rtl-\\u202egnp",
        ],
        key=lambda line: line[2:],
    )
    assert "outside" in await workplace.failure("list_dir", path="link")
    assert "cannot be listed" in await workplace.failure("list_dir", path="plain")


async def test_large_folder_listing_is_truncated(workplace: Any) -> None:
    for number in range(1005):
        (workplace.folder / str(number)).touch()
    assert (await workplace.call("list_dir")).content.endswith("\n[5 more entries are left out]")


@pytest.mark.parametrize(
    ("tool", "arguments", "expected"),
    [
        ("read_file", {}, "missing required field `path`"),
        ("read_file", {"path": 7}, "Expected `str`, got `int`"),
        ("read_file", {"path": "a", "line": 0}, "`int` >= 1"),
        ("read_file", {"path": "a", "lines": 1}, "unknown field `lines`; its arguments are: path, line, limit"),
        ("write_file", {"path": "a", "content": None}, "missing required field `content`"),
        ("bash", {"command": "ls", "timeout": 1e9}, "`int`"),
        ("todo", {"tasks": [{"content": "x", "status": "maybe"}]}, "Invalid enum value 'maybe'"),
    ],
)
async def test_tool_call_with_invalid_arguments_fails_with_an_explanation(
    workplace: Any, tool: str, arguments: dict[str, Any], expected: str
) -> None:
    assert expected in await workplace.failure(tool, **arguments)


async def test_todo_tool_stores_all_tasks_as_the_plan(workplace: Any) -> None:
    tasks = [{"content": "one", "status": "completed"}, {"content": "two", "status": "in_progress", "priority": "high"}]
    outcome = await workplace.call("todo", tasks=tasks)
    assert [(entry.content, entry.status, entry.priority) for entry in outcome.plan] == [
        ("one", "completed", "medium"),
        ("two", "in_progress", "high"),
    ]
    assert outcome.content == "The plan is noted: 1 of 2 tasks done."


def test_tool_schemas_have_no_references_and_forbid_unknown_fields(workplace: Any) -> None:
    for tool in workplace.box.tools("default"):
        assert tool.schema["type"] == "object" and tool.schema["additionalProperties"] is False
        assert "$ref" not in str(tool.schema) and "title" not in tool.schema


def test_plan_mode_does_not_offer_the_bash_tool(workplace: Any) -> None:
    names = {tool.name for tool in workplace.box.tools("plan")}
    assert "bash" not in names and {"read_file", "write_file", "edit_file", "todo"} <= names


async def test_title_of_a_command_names_its_folder_if_it_is_not_the_project(workplace: Any) -> None:
    bash = workplace.box.find("bash")
    titles = {
        cwd: bash.title({"command": "make", "cwd": cwd}, workplace.context)
        for cwd in (".", str(workplace.folder), "src", "../other")
    }
    assert list(titles.values()) == ["Run: make", "Run: make", "Run in src: make", "Run in ../other: make"]
