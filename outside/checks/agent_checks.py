"""Checks of a coding agent: a single response, and a forced tool call with its result.

The agent's table in programs.toml contains the command line and the environment of the agent. The agent runs with an
empty home folder.
"""

import os
import subprocess
from pathlib import Path

from agent_proxy import Proxy
from checking import MODEL, SETTINGS, URL, Skipped, check, run

HOME = Path(os.environ["HOME"])
ENVIRONMENT = Path(os.environ["OUTSIDE_ENVIRONMENT"])
FOLDER = HOME / "work"


def _run(prompt: str, proxy: Proxy) -> str:
    """Run the agent on a prompt, with `proxy` as its server, and return the agent's output.

    Raises:
        AssertionError: the agent failed, sent no request, or received an error response.
    """

    def filled(text: str) -> str:
        for name, value in {"url": proxy.url, "model": MODEL, "folder": str(FOLDER), "prompt": prompt}.items():
            text = text.replace(f"{{{name}}}", value)
        return text

    FOLDER.mkdir(exist_ok=True)
    for name, text in SETTINGS.get("files", {}).items():
        (HOME / name).parent.mkdir(parents=True, exist_ok=True)
        (HOME / name).write_text(filled(text))
    program = ENVIRONMENT / SETTINGS["program"]
    node = str(ENVIRONMENT / SETTINGS["node"]) if "node" in SETTINGS else "node"
    environ = {"PATH": os.environ["PATH"], "HOME": str(HOME), "TMPDIR": str(HOME), "LANG": "C.UTF-8"}
    environ |= {"HTTPS_PROXY": proxy.url, "NO_PROXY": "127.0.0.1,localhost"}
    ended = subprocess.run(
        [*([node] if program.suffix in (".js", ".cjs") else []), program, *map(filled, SETTINGS["arguments"])],
        cwd=FOLDER,
        env=environ | {name: filled(value) for name, value in SETTINGS.get("environment", {}).items()},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    print(ended.stdout, flush=True)
    for request in proxy.requests:
        print(request.path, request.status, request.answer[-600:], flush=True)
    assert ended.returncode == 0, f"ended with {ended.returncode}: {ended.stdout[-300:]}"
    assert proxy.requests, "asked the gateway nothing"
    refused = [request for request in proxy.requests if request.status != 200]
    assert not refused, f"{refused[0].path} got {refused[0].status}: {refused[0].answer[:300]!r}"
    return ended.stdout


@check
def one_turn():
    with Proxy(URL) as proxy:
        assert _run("Reply with one word: ready", proxy).strip()


@check
def forced_tool_and_its_result():
    if "tool" not in SETTINGS:
        raise Skipped("it calls no tools")
    with Proxy(URL, tool=SETTINGS["tool"]) as proxy:
        _run("Run the command: echo errand", proxy)
    assert any(request.has_result for request in proxy.requests), "no request brought the tool's result"


run()
