"""A request of Claude Code, with every kind of content block that Claude Code sends."""

from typing import Any

CACHE = {"type": "ephemeral"}
BILLING = "x-anthropic-billing-header: cc_version=2.1.37.0d9; cc_entrypoint=cli; cch=fa690;"

BASH = {
    "name": "Bash",
    "description": "Executes a bash command.",
    "input_schema": {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": {"command": {"type": "string"}, "timeout": {"type": "number"}},
        "required": ["command"],
        "additionalProperties": False,
    },
    "cache_control": CACHE,
}
READ = {
    "type": "custom",
    "name": "Read",
    "description": "Reads a file.",
    "input_schema": {"type": "object", "properties": {"file_path": {"type": "string"}}, "required": ["file_path"]},
    "eager_input_streaming": True,
}

REQUEST: dict[str, Any] = {
    "model": "small",
    "max_tokens": 32000,
    "stream": True,
    "temperature": 1,
    "system": [
        {"type": "text", "text": BILLING},
        {"type": "text", "text": "You are Claude Code.", "cache_control": CACHE},
        {"type": "text", "text": "Be concise.\n\n# Tone ", "cache_control": CACHE},
    ],
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "<system-reminder>\nToday is Monday.\n</system-reminder>"},
                {"type": "text", "text": "List the files.", "cache_control": CACHE},
            ],
        },
        {"role": "system", "content": "The plan mode is off."},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "I should run ls.", "signature": "EqoB"},
                {"type": "redacted_thinking", "data": "AAAA"},
                {"type": "text", "text": "I'll look."},
                {"type": "tool_use", "id": "toolu_01", "name": "Bash", "input": {"command": "ls", "timeout": 5}},
                {"type": "tool_use", "id": "toolu_02", "name": "Read", "input": {"file_path": "/a.txt"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_01", "content": "a.txt\nb.txt"},
                {
                    "type": "tool_result",
                    "tool_use_id": "toolu_02",
                    "is_error": True,
                    "content": [{"type": "text", "text": "<tool_use_error>No such file</tool_use_error>"}],
                    "cache_control": CACHE,
                },
                {"type": "text", "text": "<system-reminder>Mind the todo list.</system-reminder>"},
            ],
        },
        {"role": "developer", "content": [{"type": "text", "text": "Tools may be called in parallel."}]},
    ],
    "tools": [BASH, READ],
    "metadata": {"user_id": "user_1_account__session_2"},
    "thinking": {"type": "enabled", "budget_tokens": 31999},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "betas": ["claude-code-20250219"],
    "service_tier": "auto",
}
