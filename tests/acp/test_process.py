"""The agent as a process: its streams, its end, and what a sudden one leaves behind."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from editors.editor import agent_process, on
from editors.scripted_model import Answer, Call, ScriptedModel

RC3_SHA256 = ""


async def test_stdout_carries_json_rpc_only_and_bad_lines_are_answered(tmp_path: Path):
    async with ScriptedModel(Answer("Hello.")).serving() as model, agent_process(tmp_path, **on(model.url)) as agent:
        editor = agent.editor
        for line in (b"not json\n", b"\xff\xfe\n", b"\n", b"[" * 100_000 + b"\n", b'{"a":"\\ud800"}\n', b"null\n", b"[]\n"):
            editor.send(line)
        await editor.initialize()
        session = await editor.new(tmp_path)
        await editor.prompt(session, "hello \U0001f600 " + "x" * 200_000)
        assert editor.text(session) == "Hello."
        errors = [message["error"]["code"] for message in editor.received if "error" in message]
        assert errors == [-32700, -32700, -32700, -32700, -32600]
        assert await agent.close() == 0
