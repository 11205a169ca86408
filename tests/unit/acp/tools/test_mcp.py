"""Tools of MCP servers over stdio and HTTP, and failing servers."""

import asyncio
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from helexa.acp.conversation_and_events import Image
from helexa.acp.tools import mcp
from helexa.acp.tools.mcp import HttpServer, McpServer, StdioServer
from helexa.acp.tools.tool_and_effects import Calls
from helexa.acp.tools.toolbox import open_toolbox

_EXAMPLE = Path(__file__).with_name("mcp_example_server.py")
_STDIO = StdioServer("my server!", sys.executable, (str(_EXAMPLE),), {"GIVEN": "by the editor"})


@asynccontextmanager
async def opened(workplace: Any, servers: Sequence[McpServer]) -> AsyncIterator[Any]:
    """Open the workplace with MCP servers."""
    workplace.box = await open_toolbox(workplace.context, servers)
    try:
        yield workplace
    finally:
        await workplace.box.close()


async def test_tools_of_an_mcp_server_have_valid_names_and_can_be_called(
    workplace: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HELEXA_ACP_API_KEY", "sk-secret")
    async with opened(workplace, [_STDIO, StdioServer("my server?", _STDIO.command, _STDIO.args)]):
        assert workplace.box.warnings == ()
        mcp = {tool.name: tool for tool in workplace.box.tools("default") if tool.name.startswith("mcp__")}
        assert all(len(name) <= 64 and name.replace("_", "a").replace("-", "a").isalnum() for name in mcp)
        assert {"mcp__my_server___add", "mcp__my_server___add_2"} <= mcp.keys()
        add = mcp["mcp__my_server___add"]
        assert add.description == "Add two numbers." and add.schema["required"] == ["a", "b"]
        assert add.act({}, workplace.context) == Calls(add.name, only_reads=False)
        assert [t.name for t in workplace.box.tools("plan") if t.name.startswith("mcp__")] == [
            "mcp__my_server___environment",
            "mcp__my_server___environment_2",
        ]

        assert (await workplace.call("mcp__my_server___add", a=2, b=3)).content == "5"
        environment = (await workplace.call("mcp__my_server___environment")).content
        assert "GIVEN=by the editor" in environment and "sk-secret" not in environment
        failed = await workplace.call("mcp__my_server___fail")
        assert failed.failed and "out of luck" in failed.content
        large = (await workplace.call("mcp__my_server___large")).content
        assert len(large) < 50_000 and "bytes are left out here" in large
        picture = await workplace.call(next(name for name in mcp if "picture" in name))
        assert picture.content == "look" and picture.images == (Image("image/png", "iVBORw=="),)


async def test_dead_mcp_server_fails_only_its_own_tool_calls(workplace: Any) -> None:
    async with opened(workplace, [_STDIO]):
        assert "my server! failed" in await workplace.failure("mcp__my_server___die")
        assert "my server!" in await workplace.failure("mcp__my_server___add", a=1, b=1)
        assert (await workplace.call("list_dir")).content == "[the folder is empty]"


async def test_unusable_mcp_servers_give_warnings_and_usable_ones_work(workplace: Any) -> None:
    servers = [
        StdioServer("absent", "/no/such/program"),
        StdioServer("babbler", "sh", ("-c", "echo hello; echo world")),
        HttpServer("nobody", "http://127.0.0.1:9/mcp"),
        HttpServer("nonsense", "no address"),
        StdioServer("good", sys.executable, (str(_EXAMPLE),)),
    ]
    async with opened(workplace, servers):
        unusable = [warning.split()[3] for warning in workplace.box.warnings]
        assert unusable == ["absent", "babbler", "nobody", "nonsense"]
        assert (await workplace.call("mcp__good__add", a=1, b=1)).content == "2"


async def test_mcp_server_that_does_not_respond_times_out(workplace: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp, "_START_SECONDS", 0.1)
    marker = workplace.folder / "pid"
    async with opened(workplace, [StdioServer("mute", "sh", ("-c", f"echo $$ > {marker}; cat >/dev/null; exit"))]):
        assert workplace.box.warnings == (
            "The MCP server mute cannot be used: the server did not answer within 0.1 s; "
            "check the command or URL of this MCP server",
        )
    assert not marker.exists() or not Path(f"/proc/{marker.read_text().strip()}").exists()


async def test_mcp_server_process_ends_with_its_session(workplace: Any) -> None:
    marker = workplace.folder / "pid"
    script = f"echo $$ > {marker}; exec {sys.executable} {_EXAMPLE}"
    async with opened(workplace, [StdioServer("marked", "sh", ("-c", script))]):
        pid = int(marker.read_text())
        assert Path(f"/proc/{pid}").exists()
    assert not Path(f"/proc/{pid}").exists()
    assert "has ended" in await workplace.failure("mcp__marked__add", a=1, b=1)


async def test_mcp_server_is_usable_after_a_canceled_tool_call(workplace: Any) -> None:
    async with opened(workplace, [_STDIO]):
        call = asyncio.create_task(workplace.call("mcp__my_server___wait"))
        await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert (await workplace.call("mcp__my_server___add", a=1, b=2)).content == "3"


async def test_mcp_server_over_http_receives_the_configured_headers(workplace: Any) -> None:
    import uvicorn
    from mcp.server.mcpserver import MCPServer

    server = MCPServer("remote")
    server.tool(name="where")(lambda: "here I am")
    app, keys = server.streamable_http_app(), set()

    async def keyed(scope: Any, receive: Any, send: Any) -> None:
        keys.add(dict(scope.get("headers", [])).get(b"x-key"))
        await app(scope, receive, send)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        http = uvicorn.Server(uvicorn.Config(keyed, log_level="critical", timeout_graceful_shutdown=1))
        serving = asyncio.create_task(http.serve(sockets=[listener]))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/mcp"
        async with opened(workplace, [HttpServer("far", url, headers={"X-Key": "k"})]):
            assert workplace.box.warnings == ()
            assert (await workplace.call("mcp__far__where")).content == "here I am"
        http.should_exit = True
        await serving
    assert keys == {None, b"k"}  # None: the ASGI lifespan request has no headers
