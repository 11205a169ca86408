"""Recorded requests of real agents, one file per agent in `requests/`.

Long texts, secrets and values that change with each run are shortened or replaced; the structure is unchanged.
`python -m clients.coding_agents.recorded_requests NAME...` in `tests/` records the requests of the named agents again.
"""

import asyncio
import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

from clients.coding_agents.agent_run import Outcome, run
from clients.coding_agents.agents import AGENTS

FOLDER = Path(__file__).with_name("requests")

_MAX_LENGTH = 160
_PREFIX_LENGTH = 60
_DROPPED_HEADERS = frozenset({"host", "connection", "content-length", "accept-encoding", "accept-language"})
_REPLACEMENTS = (
    (re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"), "0" * 8),
    (re.compile(r"[0-9a-f]{64}"), "0" * 8),
    (re.compile(r"say:[0-9a-f,]+"), "Write a note, then show it."),
    (re.compile(r"\bses_\w+"), "ses_0"),
)


def requests(name: str) -> list[dict[str, Any]]:
    """Return an agent's recorded requests in order, with the keys `method`, `path`, `headers` and `body`."""
    return json.loads((FOLDER / f"{name}.json").read_text())["requests"]


def record(name: str) -> None:
    """Run an agent and write its requests to a file: those without tools, and the last request of the task."""
    with tempfile.TemporaryDirectory() as home:
        outcome = asyncio.run(run(AGENTS[name], Path(home)))
        print(outcome.text, *sorted(outcome.rejected_hosts), sep="\n")
        (FOLDER / f"{name}.json").write_text(json.dumps(_recording(name, outcome, home), indent=1) + "\n")


def _recording(name: str, outcome: Outcome, home: str) -> dict[str, Any]:
    with_tools = [request for request in outcome.requests if request.body and request.body.get("tools")]
    without_tools = [request for request in outcome.requests if request not in with_tools]
    return {
        "agent": AGENTS[name].package,
        "requests": [
            {
                "method": request.method,
                "path": request.path,
                "headers": _shortened({k: v for k, v in request.headers.items() if k not in _DROPPED_HEADERS}, home),
                "body": _shortened(request.body, home),
            }
            for request in [*without_tools, *with_tools[-1:]]
        ],
    }


def _shortened(value: Any, home: str) -> Any:
    match value:
        case str():
            text = value.replace(home, "/home/user")
            for pattern, replacement in _REPLACEMENTS:
                text = pattern.sub(replacement, text)
            return text if len(text) <= _MAX_LENGTH else f"{text[:_PREFIX_LENGTH]} ..."
        case list():
            return [_shortened(item, home) for item in value]
        case dict():
            return {key: _shortened(item, home) for key, item in value.items()}
        case _:
            return value


if __name__ == "__main__":
    for agent in sys.argv[1:]:
        record(agent)
