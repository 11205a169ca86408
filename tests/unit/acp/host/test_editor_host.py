"""Files and commands of a client. Errors, timeouts and invalid responses of the client always release the terminal."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from helexa.acp import editor_host as client_module
from helexa.acp.editor_host import ClientHost, open_host
from helexa.acp.host import CommandResult, HostError, LocalHost

Response = dict[str, Any] | Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]


@dataclass
class FakeClient:
    """A client with a response for each method; methods without a response fail."""

    responses: dict[str, Response] = field(default_factory=dict)
    reads_files: bool = True
    writes_files: bool = True
    runs_commands: bool = True
    requests: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    released: asyncio.Event = field(default_factory=asyncio.Event)

    async def request(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        self.requests.append((method, params))
        if method == "terminal/release":
            self.released.set()
        response = self.responses.get(method)
        if response is None:
            raise HostError(f"the client rejected {method}")
        return response if isinstance(response, dict) else await response(params)

    def methods(self) -> list[str]:
        return [method.removeprefix("terminal/") for method, _ in self.requests]


def terminal(**changed: Response) -> FakeClient:
    responses: dict[str, Response] = {
        "create": {"terminalId": "t1"},
        "wait_for_exit": {"exitCode": 0},
        "output": {"output": "done\n", "truncated": False},
        "kill": {},
        "release": {},
    }
    offered = {name: response for name, response in (responses | changed).items() if response is not None}
    return FakeClient({f"terminal/{name}": response for name, response in offered.items()})


async def wait_forever(_: dict[str, Any]) -> dict[str, Any]:
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
    """Wait until the terminal is released, which happens in the background after a cancellation."""
    await client.released.wait()
    assert client.methods().count("release") == 1


async def test_command_runs_in_a_terminal_of_the_client() -> None:
    client = terminal()
    assert await run(client) == CommandResult(exit_code=0, signal=None, output="done\n")
    assert client.methods() == ["create", "wait_for_exit", "output", "release"]
    create = client.requests[0][1]
    assert create["sessionId"] == "s1" and create["args"] == ["-c", "make"] and create["cwd"] == "/"
    assert create["outputByteLimit"] == 1000


async def test_command_that_times_out_is_killed_its_output_read_and_its_terminal_released() -> None:
    client = terminal(wait_for_exit=wait_forever)
    result = await run(client, seconds=0.01)
    assert result.timed_out and result.output == "done\n"
    assert client.methods() == ["create", "wait_for_exit", "kill", "output", "release"]


@pytest.mark.parametrize("refused", ["wait_for_exit", "output"])
async def test_error_of_the_client_fails_the_tool_and_the_terminal_is_released(refused: str) -> None:
    client = terminal()
    del client.responses[f"terminal/{refused}"]
    with pytest.raises(HostError, match=f"rejected terminal/{refused}"):
        await run(client)
    await released(client)


async def test_terminal_is_released_although_the_client_fails_to_kill_its_command() -> None:
    client = terminal(wait_for_exit=wait_forever)
    del client.responses["terminal/kill"]
    with pytest.raises(HostError, match="rejected terminal/kill"):
        await run(client, seconds=0.01)
    await released(client)


async def test_failed_release_of_the_terminal_does_not_fail_the_command() -> None:
    client = terminal()
    del client.responses["terminal/release"]
    assert (await run(client)).exit_code == 0


@pytest.mark.parametrize(
    "responses",
    [
        {"create": {}},
        {"create": {"terminalId": 7}},
        {"output": {"output": None, "truncated": False}},
        {"output": {}},
    ],
)
async def test_invalid_client_response_raises_a_host_error(responses: dict[str, Response]) -> None:
    client = terminal(**responses)
    with pytest.raises(HostError, match="has no"):
        await run(client)


async def test_invalid_exit_status_from_the_client_is_read_as_none() -> None:
    result = await run(terminal(wait_for_exit={"exitCode": "0", "signal": 9}))
    assert (result.exit_code, result.signal, result.timed_out) == (None, None, False)


async def test_canceled_command_releases_its_terminal() -> None:
    waiting = asyncio.Event()

    async def wait(_: dict[str, Any]) -> dict[str, Any]:
        waiting.set()
        return await wait_forever(_)

    client = terminal(wait_for_exit=wait)
    command = asyncio.create_task(run(client))
    await waiting.wait()
    command.cancel()
    with pytest.raises(asyncio.CancelledError):
        await command
    await released(client)


async def test_terminal_created_after_cancellation_is_released() -> None:
    requests, response = asyncio.Event(), asyncio.get_running_loop().create_future()

    async def create(_: dict[str, Any]) -> dict[str, Any]:
        requests.set()
        return await response

    client = terminal(create=create)
    command = asyncio.create_task(run(client))
    await requests.wait()
    command.cancel()
    with pytest.raises(asyncio.CancelledError):
        await command
    response.set_result({"terminalId": "late"})
    await released(client)
    assert client.requests[-1] == ("terminal/release", {"sessionId": "s1", "terminalId": "late"})


async def test_request_to_a_client_that_does_not_respond_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "_RESPONSE_SECONDS", 0.01)
    client = terminal(output=wait_forever, release=wait_forever)
    with pytest.raises(HostError, match="did not answer terminal/output"):
        await run(client)
    await released(client)


async def test_files_are_read_and_written_through_a_client_that_supports_it(tmp_path: Path) -> None:
    client = FakeClient({"fs/read_text_file": {"content": "unsaved"}, "fs/write_text_file": {}})
    (tmp_path / "a").write_text("saved")
    host = open_host(client, "s1")
    assert await host.read_text(tmp_path / "a", line=2, limit=3) == "unsaved"
    await host.write_text(tmp_path / "a", "new")
    assert client.requests == [
        ("fs/read_text_file", {"sessionId": "s1", "path": str(tmp_path / "a"), "line": 2, "limit": 3}),
        ("fs/write_text_file", {"sessionId": "s1", "path": str(tmp_path / "a"), "content": "new"}),
    ]
    assert (tmp_path / "a").read_text() == "saved"


async def test_file_error_of_the_client_does_not_fall_back_to_the_disk(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("saved")
    host = open_host(FakeClient(), "s1")
    with pytest.raises(HostError, match="rejected fs/read_text_file"):
        await host.read_text(tmp_path / "a")
    with pytest.raises(HostError, match="rejected fs/write_text_file"):
        await host.write_text(tmp_path / "a", "new")
    assert (tmp_path / "a").read_text() == "saved"


async def test_files_and_commands_use_this_machine_if_the_client_lacks_the_capability(tmp_path: Path) -> None:
    async def started(terminal_id: str | None) -> None:
        assert terminal_id is None

    client = FakeClient({"fs/read_text_file": {"content": "unsaved"}}, writes_files=False, runs_commands=False)
    host = open_host(client, "s1")
    await host.write_text(tmp_path / "a", "new")
    result = await host.run("cat a", cwd=tmp_path, timeout_s=60, output_limit=1000, started=started)
    assert result.output == "new" and client.requests == []
    silent = FakeClient(reads_files=False, writes_files=False, runs_commands=False)
    assert isinstance(open_host(silent, "s1"), LocalHost)


async def test_plan_files_are_written_locally_even_if_the_client_can_write_files(tmp_path: Path) -> None:
    client = FakeClient()
    host = open_host(client, "s1", private=[tmp_path / "plans"])
    await host.write_text(tmp_path / "plans/plan.md", "1. think")
    assert await host.read_text(tmp_path / "plans/plan.md") == "1. think" and client.requests == []
