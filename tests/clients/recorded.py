"""Requests as real agents send them, kept in `requests/`, a file per agent.

Whatever was long, secret or different each time is cut out of them; their shape is as it was.
`python -m clients.recorded NAME...`, run in `tests/`, records them anew.
"""

import asyncio
import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

from clients.agent_run import Outcome, run
from clients.agents import AGENTS

FOLDER = Path(__file__).with_name("requests")

_LONGEST = 160
_KEPT = 60
_NOT_KEPT = frozenset({"host", "connection", "content-length", "accept-encoding", "accept-language"})
_CHANGING = (
    (re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"), "0" * 8),
    (re.compile(r"[0-9a-f]{64}"), "0" * 8),
    (re.compile(r"say:[0-9a-f,]+"), "Write a note, then show it."),
    (re.compile(r"\bses_\w+"), "ses_0"),
)


def requests(name: str) -> list[dict[str, Any]]:
    """The recorded requests of an agent, in order: `method`, `path`, `headers`, `body`."""
    return json.loads((FOLDER / f"{name}.json").read_text())["requests"]


def record(name: str) -> None:
    """Run an agent and write down what it asked: the last request of its errand, and those that have no tools."""
    with tempfile.TemporaryDirectory() as home:
        outcome = asyncio.run(run(AGENTS[name], Path(home)))
        print(outcome.text, *sorted(outcome.strays), sep="\n")
        (FOLDER / f"{name}.json").write_text(json.dumps(_kept(name, outcome, home), indent=1) + "\n")


def _kept(name: str, outcome: Outcome, home: str) -> dict[str, Any]:
    working = [heard for heard in outcome.heard if heard.body and heard.body.get("tools")]
    aside = [heard for heard in outcome.heard if heard not in working]
    return {
        "agent": AGENTS[name].package,
        "requests": [
            {
                "method": heard.method,
                "path": heard.path,
                "headers": _cut({k: v for k, v in heard.headers.items() if k not in _NOT_KEPT}, home),
                "body": _cut(heard.body, home),
            }
            for heard in [*aside, *working[-1:]]
        ],
    }


def _cut(value: Any, home: str) -> Any:
    match value:
        case str():
            text = value.replace(home, "/home/user")
            for pattern, instead in _CHANGING:
                text = pattern.sub(instead, text)
            return text if len(text) <= _LONGEST else f"{text[:_KEPT]} ..."
        case list():
            return [_cut(item, home) for item in value]
        case dict():
            return {key: _cut(item, home) for key, item in value.items()}
        case _:
            return value


if __name__ == "__main__":
    for agent in sys.argv[1:]:
        record(agent)
