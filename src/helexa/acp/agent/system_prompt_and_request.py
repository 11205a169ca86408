"""Builds requests to the model: system prompt, project instructions, messages."""

import asyncio
import datetime
import hashlib
import json
import platform
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

from helexa.acp.agent.answer import AnswerCollector
from helexa.acp.agent.context_and_compaction import Turn, fit_messages, text_tokens, tokens, visible, without_images
from helexa.acp.config import Mode, Settings
from helexa.acp.conversation_and_events import CallChanged, CallStarted, Card, Message, Notice, Text
from helexa.acp.providers.models import ModelCard, Provider
from helexa.acp.providers.requests_and_events import ModelRequest, ProviderError, ToolSpec, Usage
from helexa.acp.tools.boundary_and_secrets import is_secret
from helexa.acp.tools.excerpt import fenced, shown_whole
from helexa.acp.tools.permission_rules import Offer, PermissionRequest, Scope
from helexa.acp.tools.tool_and_effects import ToolContext

NOTES = ("AGENTS.md", "CLAUDE.md")
"""File names of project instructions.

In each folder, only the first of these files that is not empty is used.
"""

MAX_NOTE_BYTES = 32_768  # maximum bytes read from one instruction file

MAX_FOLDERS = 16


async def trusted_notes(turn: Turn) -> str:
    """Return the project's instructions if the user trusts them, else an empty string.

    The user is asked once for each version of the instructions, so a changed file leads to a new question. The user
    chooses whether the answer applies to this session or to all sessions of the project. In the mode
    `bypassPermissions`, the instructions are trusted without a question.
    """
    notes = await read_notes(turn.context)
    if not notes or turn.choices.mode == "bypassPermissions":
        return notes
    trust = _trust(notes)
    trusted = turn.ruling(trust)
    if trusted is None:
        trusted = await _ask(turn, notes, trust)
        if not trusted:
            await turn.emit(
                Notice("The instructions of this project (AGENTS.md) were not allowed and are not used.", "warning")
            )
    return notes if trusted else ""


async def read_notes(context: ToolContext) -> str:
    """Return the project's instructions for agents, or an empty string.

    They are in each folder from the repository root down to the session's working directory, or only in the working
    directory if it is not in a repository. In each folder, only the first file of `NOTES` that is not empty counts.
    """
    return await asyncio.to_thread(lambda: "\n\n".join(_notes(context.cwd)))


def _trust(notes: str) -> Scope:
    """Return the scope of a decision to trust exactly this text of the instructions."""
    # If the instructions change, for example by `git pull`, the scope differs and the user is asked again.
    digest = hashlib.sha256(notes.encode(errors="surrogateescape")).hexdigest()
    return Scope("instructions", digest, "the instructions of this project (AGENTS.md) until they change")


async def _ask(turn: Turn, notes: str, trust: Scope) -> bool:
    """Show the user the whole text of `notes`, and return whether the user trusts it."""
    id = f"instructions-{uuid.uuid4()}"
    card = Card("Follow the instructions of this project?", "other", content=(Text(fenced(shown_whole(notes))),))
    await turn.emit(CallStarted(id, trust.tool, card))
    verdict = await turn.request_permission(PermissionRequest(id, trust.tool, card, {}, (Offer(trust, saved=True),)))
    trusted = verdict in ("allow_once", "allow_always")
    await turn.emit(CallChanged(id, "completed" if trusted else "failed"))
    if verdict in ("allow_once", "reject_once"):
        turn.remember(trust, trusted)
    return trusted


def _notes(cwd: Path) -> Iterator[str]:
    for folder in _folders(cwd):
        for name in NOTES:
            text = _read(folder / name, within=folder)
            if text:
                yield f'<file path="{folder / name}">\n{text}\n</file>'
                break


def _folders(cwd: Path) -> list[Path]:
    """Return the folders from the repository root to `cwd`.

    If `cwd` is not in a repository, return only `cwd`.
    """
    folders = [cwd, *cwd.parents][:MAX_FOLDERS]
    root = next((index for index, folder in enumerate(folders) if (folder / ".git").exists()), 0)
    return folders[root::-1]


def _read(path: Path, *, within: Path) -> str:
    try:
        real, root = path.resolve(), within.resolve()
        if not real.is_relative_to(root) or is_secret(real.relative_to(root)) or not real.is_file():
            # A symbolic link may lead out of the folder, or to a secret file that only the user may allow to read.
            return ""
        with path.open("rb") as file:
            content = file.read(MAX_NOTE_BYTES + 1)
    except OSError:
        return ""
    text = content[:MAX_NOTE_BYTES].decode("utf-8", "replace").strip()
    return f"{text}\n[the rest of the file is left out]" if len(content) > MAX_NOTE_BYTES else text


_AGENT = """\
You are a coding agent in the user's editor. Work in {cwd} and use tools.

Rules:
- Read files before you change them. Use glob and grep to find files and lines; do not read everything.
- Call several reading tools in one answer if they do not depend on each other.
- Make the smallest change that does what the user asked. Write in the style of the code around it.
- Check your change: run the project's tests or checks.
- If the work has several steps, call todo with the list of tasks. Call it again when a task changes.
- If a tool fails, read the error and fix the cause. Example: "old_text is not in the file" means that you must read the
  file again.
- Never invent results.
- At the end, write in a few sentences what you changed and what you could not check."""

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

Do not change files, except in {plan_dir}. Do these steps:

1. Read the code. Ask the user if something is unclear.
2. Write a plan to a file in {plan_dir}. Example: `{plan_dir}/plan.md`. Say which files you will change, in which order,
   and how you will check the changes.
3. Summarize the plan. Then let the user choose: default mode (asks before each change), accept edits (asks before
   commands only), bypass permissions (never asks), or more planning.""",
}


def system_prompt(settings: Settings, context: ToolContext, mode: Mode, notes: str) -> str:
    """Return the system prompt for the next request to the model.

    Args:
        settings: configuration, which may name a file that replaces the built-in prompt.
        context: names the folders of the session.
        mode: permission mode, whose rules are added.
        notes: the project's instructions.

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
        sections.append(f"# Instructions of this project\n\n{notes}")
    if mode_rules := _MODES[mode]:
        sections.append(mode_rules.replace("{plan_dir}", str(context.plan_dir)))
    return "\n\n".join(sections)


MAX_TOKENS = 8192
"""Default maximum of response tokens.

Smaller limits often end a response in the middle of a file.
"""

MARGIN = 512  # tokens reserved for chat template tokens, which the estimate does not count

MIN_CONTEXT = 1024  # smaller context sizes in the error messages of endpoints are ignored as implausible

_SHRINK = 0.6  # size of the next request relative to the rejected request, if the endpoint does not report its limit


class RequestBuilder:
    """Builds the requests to the model while the agent works on one prompt."""

    def __init__(self, turn: Turn, notes: str) -> None:
        # whether the last request is too long for the context even after old messages were shortened
        self.overflows = False
        self._turn = turn
        self._notes = notes
        self._factor = 1.0  # tokens counted by the endpoint per estimated token
        self._estimate = 0.0  # estimated tokens of the last request
        self._max_request_tokens: int | None = None  # maximum request tokens if the context size is unknown
        self._context: int | None = None
        self._max_tokens = MAX_TOKENS

    # The prompt, tools and messages are built for each request, because the user's choices and the history may change.
    def request(self, provider: Provider) -> ModelRequest:
        """Return the next request, with messages shortened to fit into the context.

        If even the shortened messages are too long, `overflows` is True afterwards.

        Raises:
            ProviderError: the configured system prompt cannot be read.
        """
        turn, choices = self._turn, self._turn.choices
        card = turn.models.card(choices.model)
        tools = [ToolSpec(tool.name, tool.description, tool.schema) for tool in turn.toolbox.tools(choices.mode)]
        try:
            system = system_prompt(turn.settings, turn.context, choices.mode, self._notes)
        except (OSError, UnicodeDecodeError) as error:
            path = turn.settings.system_prompt_path
            raise ProviderError(
                "invalid", f"the system prompt {path} cannot be read: {error}; correct system_prompt_path"
            ) from error
        self._context = min(filter(None, (card.context, self._max_request_tokens)), default=None)
        self._max_tokens = _max_tokens(provider, card, self._context)
        messages: Sequence[Message] = visible(turn.messages)
        if card.images is False:
            messages = without_images(messages)
        fixed_tokens = text_tokens(system) + sum(
            text_tokens(tool.description + json.dumps(tool.schema)) for tool in tools
        )
        self._estimate = fixed_tokens + tokens(messages)
        self.overflows = False
        if self._context is not None:
            available_tokens = (self._context - self._max_tokens - MARGIN) / self._factor
            messages = fit_messages(messages, available_tokens - fixed_tokens)
            self._estimate = fixed_tokens + tokens(messages)
            self.overflows = self._estimate > available_tokens
        return ModelRequest(
            model=choices.model.model,
            system=system,
            messages=messages,
            tools=tools,
            max_tokens=self._max_tokens,
            thought_level=choices.thought_level,
            temperature=choices.temperature,
        )

    def check(self) -> None:
        """Raise ProviderError if the last request is estimated to exceed the context."""
        size = round(self._estimate * self._factor)
        # Raise the error here, because some endpoints truncate long requests silently.
        if self._context is not None and size > self._context:
            model = self._turn.choices.model
            raise ProviderError(
                "context_limit",
                f"the request has about {size} tokens, but the context of {model} has {self._context}: choose a model "
                "with a larger context, or clear the conversation with /clear",
            )

    def learn(self, error: ProviderError) -> None:
        """Lower the size limit of requests after an error about the context limit."""
        limit = error.context_limit
        if limit is not None and limit >= MIN_CONTEXT:
            self._turn.models.learn_context(self._turn.choices.model, limit)
            self._factor = max(self._factor, (limit - self._max_tokens) / max(self._estimate, 1.0))
        else:
            self._max_request_tokens = int(self._estimate * self._factor * _SHRINK) + self._max_tokens

    def calibrate(self, usage: Usage | None) -> None:
        """Adjust the token estimates to the endpoint's token count of the last request.

        Do nothing if `usage` is None or has no input tokens.
        """
        if usage is not None and usage.input:
            self._factor = min(max(usage.input / max(self._estimate, 1.0), 0.5), 3.0)

    def usage(self, answer: AnswerCollector) -> Usage:
        """Return the token counts of the last request and of its response, `answer`.

        The counts are estimates if the endpoint reported none.
        """
        return answer.usage or Usage(round(self._estimate * self._factor), round(text_tokens(answer.text)))


def _max_tokens(provider: Provider, card: ModelCard, context: int | None) -> int:
    """Return the maximum number of response tokens for a request.

    A configured limit is reduced to at most half of `context`. The default limit is reduced to at most a quarter.
    """
    configured = provider.endpoint.max_tokens
    max_tokens = min(filter(None, (configured or MAX_TOKENS, card.max_output)))
    if context is None:
        return max_tokens
    return max(1, min(max_tokens, context // (2 if configured else 4)))
