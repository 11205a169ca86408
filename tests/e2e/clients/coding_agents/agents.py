"""Coding agents from npm's registry, configured as in docs/clients.md, each with a task for its own tools."""

import json
from dataclasses import dataclass, field

from clients.scripted_engine import say
from clients.scripted_stack import MODEL

Call = tuple[str, dict[str, str]]

PROMPT = "..."
THOUGHT = "What is next?"
FINAL_TEXT = "The task is done."


def task_prompt(calls: list[Call]) -> str:
    """Return a prompt that makes the scripted model think and call each tool in turn, then finish."""
    written = [json.dumps({"name": name, "arguments": arguments}) for name, arguments in calls]
    thought = f"<think>\n{THOUGHT}\n</think>\n\n"
    return say(*[f"{thought}<tool_call>\n{call}\n</tool_call>" for call in written], thought + FINAL_TEXT)


@dataclass(frozen=True)
class Agent:
    """One agent. In its texts, `{url}` is replaced by the gateway's URL and `{folder}` by the working directory.

    Attributes:
        package: the npm package with its version.
        program: the program's path below `node_modules`; Node.js runs JavaScript files.
        arguments: the program's arguments for one task without interaction; `PROMPT` is replaced by the prompt.
        tool_calls: calls of the agent's own tools that the scripted model makes.
        path: the API path of the agent's requests.
        environ: environment variables in addition to `HOME`.
        files: contents of files in the home directory, by relative path.
        rejected_hosts: hosts that the agent contacts in spite of its settings.
        uses_thinking: whether the agent asks the model to think.
    """

    name: str
    package: str
    program: str
    arguments: list[str]
    tool_calls: list[Call]
    path: str
    environ: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    rejected_hosts: frozenset[str] = frozenset()
    uses_thinking: bool = True


_CLAUDE_CODE = Agent(
    name="claude-code",
    package="@anthropic-ai/claude-code@2.1.330",
    program="@anthropic-ai/claude-code/cli-wrapper.cjs",
    arguments=["-p", PROMPT, "--model", MODEL, "--allowedTools", "Write,Read,Bash"],
    tool_calls=[
        ("Write", {"file_path": "{folder}/note.txt", "content": "errand\n"}),
        ("Bash", {"command": "cat note.txt", "description": "Show the note"}),
    ],
    path="/v1/messages",
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
    tool_calls=[("exec_command", {"cmd": "echo errand > note.txt"}), ("exec_command", {"cmd": "cat note.txt"})],
    path="/v1/responses",
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
    package="opencode-linux-x64@1.18.33",  # the binary package that opencode-ai depends on
    program="opencode-linux-x64/bin/opencode",
    arguments=["run", "--model", f"helexa/{MODEL}", PROMPT],
    tool_calls=[
        ("write", {"filePath": "{folder}/note.txt", "content": "errand\n"}),
        ("bash", {"command": "cat note.txt", "description": "Show the note"}),
    ],
    path="/v1/chat/completions",
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
    rejected_hosts=frozenset({"registry.npmjs.org:443"}),  # for its plugins' type declarations
    uses_thinking=False,
)


def _pi(name: str, api: str, path: str, base_url: str) -> Agent:
    """Return Pi, configured for one of the three API formats that it supports."""
    model = {"id": MODEL, "reasoning": True, "contextWindow": 131072, "maxTokens": 4096}
    provider = {"baseUrl": base_url, "api": api, "apiKey": "placeholder", "models": [model]}
    return Agent(
        name=name,
        package="@mariozechner/pi-coding-agent@0.73.1",
        program="@mariozechner/pi-coding-agent/dist/cli.js",
        arguments=["--provider", "helexa", "--model", MODEL, "--thinking", "low", "-p", PROMPT],
        tool_calls=[("write", {"path": "note.txt", "content": "errand\n"}), ("bash", {"command": "cat note.txt"})],
        path=path,
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
