"""Real coding agents, as npm installs them, run an errand of two tools through gateway and node, with a scripted model.

Claude Code and Codex are hundreds of megabytes each; `HELEXA_TEST_AGENTS="claude-code codex"` has them run too.
"""

import os
from itertools import pairwise
from pathlib import Path

import pytest

from clients.agent_run import run
from clients.agents import AGENTS, DONE, THOUGHT
from clients.recorded import requests

NAMES = ["opencode", "pi-chat", "pi-messages", "pi-responses", *os.environ.get("HELEXA_TEST_AGENTS", "").split()]

_ANSWER = "<|im_start|>assistant\n"


@pytest.mark.parametrize("name", NAMES)
async def test_an_agent_runs_its_errand(name: str, tmp_path: Path) -> None:
    agent = AGENTS[name]
    outcome = await run(agent, tmp_path)
    assert outcome.status == 0 and DONE in outcome.text, outcome.text
    assert outcome.note == "errand\n", outcome.text
    assert [heard.refusal for heard in outcome.heard if heard.status >= 400] == []
    assert {heard.path.partition("?")[0] for heard in outcome.heard} == {agent.dialect}
    assert outcome.strays <= agent.strays

    prompts = [prompt for prompt in outcome.asked if "<tools>" in prompt]
    assert len(prompts) == len(agent.errand) + 1
    for before, after in pairwise(prompts):  # so that what was computed is found again
        assert after.startswith(before.rpartition(_ANSWER)[0])
    turns = prompts[-1].split(_ANSWER)[1:-1]
    for turn, (tool, _) in zip(turns, agent.errand, strict=True):
        assert f'<tool_call>\n{{"name": "{tool}"' in turn
        assert turn.startswith(f"<think>\n{THOUGHT}\n</think>\n\n") == agent.thinks

    recorded, last = requests(name)[-1]["body"], outcome.heard[-1].body  # other tests take the first for the second
    assert recorded.keys() == last.keys()
    assert [tool.get("name") for tool in recorded["tools"]] == [tool.get("name") for tool in last["tools"]]
