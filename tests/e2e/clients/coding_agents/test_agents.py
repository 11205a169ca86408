"""Real coding agents from npm complete a task with two tools through gateway and node, with a scripted model.

Claude Code and Codex, of hundreds of megabytes each, run only with `HELEXA_TEST_AGENTS="claude-code codex"`.
"""

import os
from itertools import pairwise
from pathlib import Path

import pytest

from clients.coding_agents.agent_run import run
from clients.coding_agents.agents import AGENTS, FINAL_TEXT, THOUGHT
from clients.coding_agents.recorded_requests import requests

NAMES = ["opencode", "pi-chat", "pi-messages", "pi-responses", *os.environ.get("HELEXA_TEST_AGENTS", "").split()]

_ASSISTANT = "<|im_start|>assistant\n"


@pytest.mark.parametrize("name", NAMES)
async def test_coding_agent_completes_its_task_through_the_gateway(name: str, tmp_path: Path) -> None:
    agent = AGENTS[name]
    outcome = await run(agent, tmp_path)
    assert outcome.status == 0 and FINAL_TEXT in outcome.text, outcome.text
    assert outcome.note == "errand\n", outcome.text
    assert [request.error_body for request in outcome.requests if request.status >= 400] == []
    assert {request.path.partition("?")[0] for request in outcome.requests} == {agent.path}
    assert outcome.rejected_hosts <= agent.rejected_hosts

    prompts = [prompt for prompt in outcome.prompts if "<tools>" in prompt]
    assert len(prompts) == len(agent.tool_calls) + 1
    for previous, current in pairwise(prompts):  # each prompt extends the previous one: prefix reuse applies
        assert current.startswith(previous.rpartition(_ASSISTANT)[0])
    turns = prompts[-1].split(_ASSISTANT)[1:-1]
    for turn, (tool, _) in zip(turns, agent.tool_calls, strict=True):
        assert f'<tool_call>\n{{"name": "{tool}"' in turn
        assert turn.startswith(f"<think>\n{THOUGHT}\n</think>\n\n") == agent.uses_thinking

    stored, last = requests(name)[-1]["body"], outcome.requests[-1].body  # other tests use the recorded request
    assert stored.keys() == last.keys()
    assert [tool.get("name") for tool in stored["tools"]] == [tool.get("name") for tool in last["tools"]]
