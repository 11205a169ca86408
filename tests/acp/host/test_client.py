"""Files and commands of a client that may refuse, be late or talk nonsense: a terminal is released in every case."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from helexa.acp.host import client as hosting
from helexa.acp.host.client import ClientHost, open_host
from helexa.acp.host.host import CommandResult, HostError
from helexa.acp.host.local import LocalHost

Answer = dict[str, Any] | Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]


@dataclass
class FakeClient:
    """Answers by method; what it has no answer to it refuses."""

    answers: dict[str, Answer] = field(default_factory=dict)
    reads_files: bool = True
    writes_files: bool = True
    runs_commands: bool = True
    asked: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    released: asyncio.Event = field(default_factory=asyncio.Event)

    async def request(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        self.asked.append((method, params))
        if method == "terminal/release":
            self.released.set()
        answer = self.answers.get(method)
        if answer is None:
            raise HostError(f"the client refused {method}")
        return answer if isinstance(answer, dict) else await answer(params)

    def methods(self) -> list[str]:
        return [method.removeprefix("terminal/") for method, _ in self.asked]


def terminal(**changed: Answer) -> FakeClient:
    answers: dict[str, Answer] = {
        "create": {"terminalId": "t1"},
        "wait_for_exit": {"exitCode": 0},
        "output": {"output": "done\n", "truncated": False},
        "kill": {},
        "release": {},
    }
    kept = {name: answer for name, answer in (answers | changed).items() if answer is not None}
    return FakeClient({f"terminal/{name}": answer for name, answer in kept.items()})


async def never(_: dict[str, Any]) -> dict[str, Any]:
    return await asyncio.get_running_loop().create_future()


async def run(client: FakeClient, seconds: float = 60) -> CommandResult:
    shown: list[str | None] = []

    async def started(terminal_id: str | None) -> None:
        shown.append(terminal_id)

    host = ClientHost(client, "s1", LocalHost())
    result = await host.run("make", cwd=Path("/"), timeout_s=seconds, output_limit=1000, started=started)
    assert shown == ["t1"]
    return result


async def released(client: FakeClient) -> None:
    """Wait until the terminal was released; nobody waits for that when a turn is cancelled."""
    await client.released.wait()
    assert client.methods().count("release") == 1


async def test_a_command_runs_in_a_terminal_of_the_client() -> None:
    client = terminal()
    assert await run(client) == CommandResult(exit_code=0, signal=None, output="done\n")
    assert client.methods() == ["create", "wait_for_exit", "output", "release"]
    create = client.asked[0][1]
    assert create["sessionId"] == "s1" and create["args"] == ["-c", "make"] and create["cwd"] == "/"
    assert create["outputByteLimit"] == 1000


async def test_time_over_is_kill_then_output_then_release() -> None:
    client = terminal(wait_for_exit=never)
    result = await run(client, seconds=0.01)
    assert result.timed_out and result.output == "done\n"
    assert client.methods() == ["create", "wait_for_exit", "kill", "output", "release"]


@pytest.mark.parametrize("refused", ["wait_for_exit", "output"])
async def test_a_refusal_is_a_failure_of_the_tool_and_the_terminal_is_released(refused: str) -> None:
    client = terminal()
    del client.answers[f"terminal/{refused}"]
    with pytest.raises(HostError, match=f"refused terminal/{refused}"):
        await run(client)
    await released(client)


async def test_a_kill_that_is_refused_still_releases() -> None:
    client = terminal(wait_for_exit=never)
    del client.answers["terminal/kill"]
    with pytest.raises(HostError, match="refused terminal/kill"):
        await run(client, seconds=0.01)
    await released(client)


async def test_a_release_that_is_refused_spoils_nothing() -> None:
    client = terminal()
    del client.answers["terminal/release"]
    assert (await run(client)).exit_code == 0


@pytest.mark.parametrize(
    "answers",
    [
        {"create": {}},
        {"create": {"terminalId": 7}},
        {"output": {"output": None, "truncated": False}},
        {"output": {}},
    ],
)
async def test_nonsense_is_a_failure(answers: dict[str, Answer]) -> None:
    client = terminal(**answers)
    with pytest.raises(HostError, match="has no"):
        await run(client)


async def test_a_strange_exit_status_is_no_status() -> None:
    result = await run(terminal(wait_for_exit={"exitCode": "0", "signal": 9}))
    assert (result.exit_code, result.signal, result.timed_out) == (None, None, False)


async def test_a_cancelled_command_is_released() -> None:
    waiting = asyncio.Event()

    async def wait(_: dict[str, Any]) -> dict[str, Any]:
        waiting.set()
        return await never(_)

    client = terminal(wait_for_exit=wait)
    command = asyncio.create_task(run(client))
    await waiting.wait()
    command.cancel()
    with pytest.raises(asyncio.CancelledError):
        await command
    await released(client)


async def test_a_terminal_that_comes_too_late_is_released_all_the_same() -> None:
    asked, answer = asyncio.Event(), asyncio.get_running_loop().create_future()

    async def create(_: dict[str, Any]) -> dict[str, Any]:
        asked.set()
        return await answer

    client = terminal(create=create)
    command = asyncio.create_task(run(client))
    await asked.wait()
    command.cancel()
    with pytest.raises(asyncio.CancelledError):
        await command
    answer.set_result({"terminalId": "late"})
    await released(client)
    assert client.asked[-1] == ("terminal/release", {"sessionId": "s1", "terminalId": "late"})


async def test_a_client_that_never_answers_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosting, "_ANSWER_SECONDS", 0.01)
    client = terminal(output=never, release=never)
    with pytest.raises(HostError, match="did not answer terminal/output"):
        await run(client)
    await released(client)


async def test_files_are_the_client_s_where_it_offers_them(tmp_path: Path) -> None:
    client = FakeClient({"fs/read_text_file": {"content": "unsaved"}, "fs/write_text_file": {}})
    (tmp_path / "a").write_text("saved")
    host = open_host(client, "s1")
    assert await host.read_text(tmp_path / "a", line=2, limit=3) == "unsaved"
    await host.write_text(tmp_path / "a", "new")
    assert client.asked == [
        ("fs/read_text_file", {"sessionId": "s1", "path": str(tmp_path / "a"), "line": 2, "limit": 3}),
        ("fs/write_text_file", {"sessionId": "s1", "path": str(tmp_path / "a"), "content": "new"}),
    ]
    assert (tmp_path / "a").read_text() == "saved"


async def test_a_refused_file_is_not_taken_from_the_disk(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("saved")
    host = open_host(FakeClient(), "s1")
    with pytest.raises(HostError, match="refused fs/read_text_file"):
        await host.read_text(tmp_path / "a")
    with pytest.raises(HostError, match="refused fs/write_text_file"):
        await host.write_text(tmp_path / "a", "new")
    assert (tmp_path / "a").read_text() == "saved"


async def test_what_is_not_offered_is_of_this_machine(tmp_path: Path) -> None:
    async def started(terminal_id: str | None) -> None:
        assert terminal_id is None

    client = FakeClient({"fs/read_text_file": {"content": "unsaved"}}, writes_files=False, runs_commands=False)
    host = open_host(client, "s1")
    await host.write_text(tmp_path / "a", "new")
    result = await host.run("cat a", cwd=tmp_path, timeout_s=60, output_limit=1000, started=started)
    assert result.output == "new" and client.asked == []
    silent = FakeClient(reads_files=False, writes_files=False, runs_commands=False)
    assert isinstance(open_host(silent, "s1"), LocalHost)


async def test_plans_are_files_of_ours(tmp_path: Path) -> None:
    client = FakeClient()
    host = open_host(client, "s1", private=[tmp_path / "plans"])
    await host.write_text(tmp_path / "plans/plan.md", "1. think")
    assert await host.read_text(tmp_path / "plans/plan.md") == "1. think" and client.asked == []
