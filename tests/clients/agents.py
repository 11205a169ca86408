"""Coding agents out of npm's registry, set up as docs/clients.md says: which package, which settings, which errand."""

import json
from dataclasses import dataclass, field

from clients.saying_engine import say
from clients.saying_stack import MODEL

Call = tuple[str, dict[str, str]]

PROMPT = "..."
THOUGHT = "What is next?"
DONE = "The errand is done."


def errand(calls: list[Call]) -> str:
    """What to ask an agent, so that its model thinks before it calls one tool after the other, and then is done."""
    written = [json.dumps({"name": name, "arguments": arguments}) for name, arguments in calls]
    thought = f"<think>\n{THOUGHT}\n</think>\n\n"
    return say(*[f"{thought}<tool_call>\n{call}\n</tool_call>" for call in written], thought + DONE)


@dataclass(frozen=True)
class Agent:
    """One agent. `{url}` (of the gateway) and `{folder}` (it works in) are filled in, in its texts.

    Attributes:
        package: what npm installs, with its version.
        program: what is run, below `node_modules`; JavaScript is run by node.
        arguments: of the program, to work on `PROMPT`, for which the errand is put, and end.
        errand: the tools of its own that the model calls for it.
        dialect: the path that its requests go to.
        environ: what it needs beside a home.
        files: below its home.
        strays: hosts that it turns to all the same.
        thinks: whether its model is to think.
    """

    name: str
    package: str
    program: str
    arguments: list[str]
    errand: list[Call]
    dialect: str
    environ: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    strays: frozenset[str] = frozenset()
    thinks: bool = True


_CLAUDE_CODE = Agent(
    name="claude-code",
    package="@anthropic-ai/claude-code@2.1.330",
    program="@anthropic-ai/claude-code/cli-wrapper.cjs",
    arguments=["-p", PROMPT, "--model", MODEL, "--allowedTools", "Write,Read,Bash"],
    errand=[
        ("Write", {"file_path": "{folder}/note.txt", "content": "errand\n"}),
        ("Bash", {"command": "cat note.txt", "description": "Show the note"}),
    ],
    dialect="/v1/messages",
    environ={
        "ANTHROPIC_BASE_URL": "{url}",
        "ANTHROPIC_AUTH_TOKEN": "placeholder",
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": MODEL,
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": "131072",
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "8192",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    },
)

_CODEX = Agent(
    name="codex",
    package="@openai/codex@0.169.0",
    program="@openai/codex/bin/codex.js",
    arguments=["exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", PROMPT],
    errand=[("exec_command", {"cmd": "echo errand > note.txt"}), ("exec_command", {"cmd": "cat note.txt"})],
    dialect="/v1/responses",
    environ={"HELEXA_API_KEY": "placeholder"},
    files={
        ".codex/config.toml": (
            f'model = "{MODEL}"\nmodel_provider = "helexa"\nmodel_context_window = 131072\n'
            "check_for_update_on_startup = false\n"
            '[model_providers.helexa]\nname = "helexa"\nbase_url = "{url}/v1"\nenv_key = "HELEXA_API_KEY"\n'
            'wire_api = "responses"\n'
            "[features]\napps = false\nplugins = false\n[analytics]\nenabled = false\n"
        )
    },
)

_OPENCODE = Agent(
    name="opencode",
    package="opencode-linux-x64@1.18.33",  # what opencode-ai brings, without its twin for older processors
    program="opencode-linux-x64/bin/opencode",
    arguments=["run", "--model", f"helexa/{MODEL}", PROMPT],
    errand=[
        ("write", {"filePath": "{folder}/note.txt", "content": "errand\n"}),
        ("bash", {"command": "cat note.txt", "description": "Show the note"}),
    ],
    dialect="/v1/chat/completions",
    environ={"OPENCODE_DISABLE_MODELS_FETCH": "1"},
    files={
        ".config/opencode/opencode.json": json.dumps(
            {
                "autoupdate": False,
                "provider": {
                    "helexa": {
                        "npm": "@ai-sdk/openai-compatible",
                        "options": {"baseURL": "{url}/v1", "apiKey": "placeholder"},
                        "models": {MODEL: {"limit": {"context": 131072, "output": 4096}}},
                    }
                },
            }
        )
    },
    strays=frozenset({"registry.npmjs.org:443"}),  # for the types of its plugins
    thinks=False,
)


def _pi(name: str, api: str, dialect: str, base_url: str) -> Agent:
    """Pi speaks three dialects, each as its settings say."""
    model = {"id": MODEL, "reasoning": True, "contextWindow": 131072, "maxTokens": 4096}
    provider = {"baseUrl": base_url, "api": api, "apiKey": "placeholder", "models": [model]}
    return Agent(
        name=name,
        package="@mariozechner/pi-coding-agent@0.73.1",
        program="@mariozechner/pi-coding-agent/dist/cli.js",
        arguments=["--provider", "helexa", "--model", MODEL, "--thinking", "low", "-p", PROMPT],
        errand=[("write", {"path": "note.txt", "content": "errand\n"}), ("bash", {"command": "cat note.txt"})],
        dialect=dialect,
        environ={"PI_OFFLINE": "1", "PI_TELEMETRY": "0"},
        files={".pi/agent/models.json": json.dumps({"providers": {"helexa": provider}})},
    )


AGENTS = {
    agent.name: agent
    for agent in (
        _CLAUDE_CODE,
        _CODEX,
        _OPENCODE,
        _pi("pi-chat", "openai-completions", "/v1/chat/completions", "{url}/v1"),
        _pi("pi-messages", "anthropic-messages", "/v1/messages", "{url}"),
        _pi("pi-responses", "openai-responses", "/v1/responses", "{url}/v1"),
    )
}
