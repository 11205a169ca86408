"""The system prompt: role, environment, project instructions, and the rules of the session's permission mode."""

import asyncio
import datetime
import platform
from collections.abc import Iterator
from pathlib import Path

from helexa.acp.config import Mode, Settings
from helexa.acp.tools.tool import ToolContext

NOTES = ("AGENTS.md", "CLAUDE.md")
"""File names of project instructions. Only the first file that exists in a folder is used."""

MAX_NOTE_BYTES = 32_768
"""Maximum bytes read from one instruction file."""

MAX_FOLDERS = 16

_AGENT = """\
You are a coding agent in the user's editor. You work in {cwd} and act through tools: read before you change, make the
smallest change that does what was asked, in the style of the code around it, and check it by running what the project
has for that. Find things with search tools rather than by reading everything. Call independent reading tools together.
For work of several steps keep a list of tasks and update it as you go. When a tool fails, read why and mend the cause.
Never invent results. When you are done, say in a few sentences what you changed and what you could not check."""

_ENVIRONMENT = """\
Working directory: {cwd}{other_roots}
Platform: {platform}
Date: {date}"""

_MODES: dict[Mode, str] = {
    "default": "",
    "acceptEdits": "",
    "bypassPermissions": "",
    "plan": """\
# Plan mode

Change nothing but files in {plan_dir}. Look around, ask what is unclear, and write a plan: what changes where, in which
order, and how it is checked. When the plan stands, sum it up and let the user choose how to go on: default mode (asks
before each change), accept edits (asks before commands only), bypass permissions (never asks), or more planning.""",
}


async def read_notes(context: ToolContext) -> str:
    """Return the text of the project's instruction files for agents (`AGENTS.md`), or an empty string.

    The files are read from each folder from the repository root down to the session's working directory.
    """
    return await asyncio.to_thread(lambda: "\n\n".join(_notes(context.cwd)))


def system_prompt(settings: Settings, context: ToolContext, mode: Mode, notes: str) -> str:
    """Return the system prompt for the next request to the model.

    Args:
        settings: configuration, which may name a file that replaces the built-in prompt.
        context: provides the session's folders.
        mode: permission mode, whose rules are added.
        notes: project instructions from `read_notes`.

    Raises:
        OSError, UnicodeDecodeError: the configured prompt file cannot be read.
    """
    custom_path = settings.system_prompt_path
    agent = custom_path.read_text("utf-8") if custom_path else _AGENT
    other_roots = "".join(f"\nAlso: {root}" for root in context.roots if root != context.cwd)
    environment = _ENVIRONMENT.format(
        cwd=context.cwd, other_roots=other_roots, platform=platform.system(), date=datetime.date.today().isoformat()
    )
    sections = [agent.replace("{cwd}", str(context.cwd)).strip(), environment]
    if notes:
        sections.append(f"# What this project says of itself\n\n{notes}")
    if mode_rules := _MODES[mode]:
        sections.append(mode_rules.replace("{plan_dir}", str(context.plan_dir)))
    return "\n\n".join(sections)


def _notes(cwd: Path) -> Iterator[str]:
    for folder in _folders(cwd):
        for name in NOTES:
            text = _read(folder / name, within=folder)
            if text:
                yield f'<file path="{folder / name}">\n{text}\n</file>'
                break


def _folders(cwd: Path) -> list[Path]:
    """Return the folders from the repository root down to `cwd`, or only `cwd` outside a repository."""
    folders = [cwd, *cwd.parents][:MAX_FOLDERS]
    root = next((index for index, folder in enumerate(folders) if (folder / ".git").exists()), 0)
    return folders[root::-1]


def _read(path: Path, *, within: Path) -> str:
    try:
        if not path.resolve().is_relative_to(within.resolve()):
            return ""  # the symbolic link leads out of the project, so its target is untrusted
        with path.open("rb") as file:
            content = file.read(MAX_NOTE_BYTES + 1)
    except OSError:
        return ""
    text = content[:MAX_NOTE_BYTES].decode("utf-8", "replace").strip()
    return f"{text}\n[cut here: the file is longer]" if len(content) > MAX_NOTE_BYTES else text
