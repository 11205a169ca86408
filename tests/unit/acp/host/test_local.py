"""Local commands: output, timeouts, cancellation, and cleanup of processes and descriptors."""

import asyncio
import os
from pathlib import Path

import pytest

from helexa.acp.host import CommandResult, HostError, LocalHost


async def run(command: str, cwd: Path, seconds: float = 60, limit: int = 1 << 20) -> CommandResult:
    async def started(terminal_id: str | None) -> None:
        assert terminal_id is None

    return await LocalHost().run(command, cwd=cwd, timeout_s=seconds, output_limit=limit, started=started)


async def wait_until_ended(pid: int) -> None:
    """Wait until a process has ended; a zombie counts as ended."""
    while True:
        try:
            status = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return
        if status.rpartition(")")[2].split()[0] == "Z":
            return
        await asyncio.sleep(0.01)


async def test_command_returns_its_output_exit_status_and_signal(tmp_path: Path) -> None:
    result = await run("pwd; echo oops >&2; exit 3", tmp_path)
    assert result == CommandResult(exit_code=3, signal=None, output=f"{tmp_path}\noops\n")
    assert (await run("kill -TERM $$", tmp_path)).signal == "SIGTERM"
    assert (await run("cat", tmp_path)).exit_code == 0  # stdin is empty
    assert (await run("printf '\\377ok'", tmp_path)).output == "\ufffdok"


async def test_truncated_output_keeps_its_end_without_split_characters(tmp_path: Path) -> None:
    result = await run("for i in $(seq 1 20000); do printf 'é€😀'; done; printf end", tmp_path, limit=1000)
    assert result.truncated and result.output.endswith("😀end")
    assert len(result.output.encode()) <= 1000 and "\ufffd" not in result.output


async def test_output_of_10_mb_is_truncated(tmp_path: Path) -> None:
    result = await run("head -c 10000000 /dev/zero | tr '\\0' x", tmp_path)
    assert result.truncated and len(result.output) == 1 << 20


async def test_command_that_times_out_keeps_its_output(tmp_path: Path) -> None:
    result = await run("echo said; trap 'echo asked; exit 0' TERM; sleep 60 & wait", tmp_path, seconds=0.5)
    assert result.timed_out and result.output == "said\nasked\n"


async def test_command_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    result = await run("trap '' TERM; echo $$; while :; do sleep 0.1; done", tmp_path, seconds=0.5)
    assert result.timed_out and result.signal == "SIGKILL"
    await wait_until_ended(int(result.output))


async def test_background_processes_end_with_the_command(tmp_path: Path) -> None:
    result = await run("sleep 300 & echo $!", tmp_path)
    assert result.exit_code == 0
    await wait_until_ended(int(result.output))


async def test_canceled_command_leaves_no_process(tmp_path: Path) -> None:
    command = asyncio.create_task(
        run("echo $$ > pid.part; sleep 300 & echo $! >> pid.part; mv pid.part pid; wait", tmp_path)
    )
    pids = tmp_path / "pid"
    while not pids.exists():  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    command.cancel()
    with pytest.raises(asyncio.CancelledError):
        await command
    for pid in pids.read_text().split():
        await wait_until_ended(int(pid))


async def test_file_descriptors_are_closed_after_commands(tmp_path: Path) -> None:
    await run("true", tmp_path)
    open_descriptors = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    for _ in range(5):
        await run("true", tmp_path)
        with pytest.raises(HostError):
            await run("true", tmp_path / "absent")
    assert len(os.listdir("/proc/self/fd")) == open_descriptors  # noqa: PTH208


async def test_command_that_cannot_be_started_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(HostError, match="could not be started"):
        await run("true", tmp_path / "absent")
    with pytest.raises(HostError, match="could not be started"):
        await run("echo \0", tmp_path)


async def test_secrets_are_removed_from_command_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEY", "sk-secret")
    monkeypatch.setenv("OTHER", "seen")

    async def started(terminal_id: str | None) -> None: ...

    host = LocalHost(secrets=["sk-secret"])
    result = await host.run("env", cwd=tmp_path, timeout_s=60, output_limit=1 << 20, started=started)
    assert "sk-secret" not in result.output and "OTHER=seen" in result.output
