"""`helexa run`: download a model if it is missing, and chat with it on a terminal or print one response."""

from typing import Annotated

from cyclopts import Parameter

from helexa.cli.commands.chat import chat
from helexa.cli.commands.completion import ModelName
from helexa.cli.flags import Quiet, SamplingFlags, Switch, TargetFlags, Verbose


def run(
    model: ModelName,
    prompt: str | None = None,
    /,
    *,
    system: Annotated[str | None, Parameter(alias="-s")] = None,
    think: bool | None = None,
    stats: Switch = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    target_flags: TargetFlags = TargetFlags(),  # noqa: B008
    sampling: SamplingFlags = SamplingFlags(),  # noqa: B008
) -> int:
    """Run a model, downloaded if missing: chat with it, or ask it for one answer.

    Without PROMPT on a terminal, this starts a conversation. With PROMPT, or with text piped in, one answer goes to
    stdout.

    Args:
        model: Model name: helexa/small, org/name, pypi:package or a path.
        prompt: Prompt; text piped in is appended.
        system: System prompt.
        think: Whether the model reasons before it answers, else the model's default.
        stats: Print token counts and durations of each answer on stderr.
        quiet: Print only errors on stderr.
        verbose: Print where the model runs on stderr.
    """
    return chat(
        prompt,
        model=model,
        system=system,
        think=think,
        stats=stats,
        quiet=quiet,
        verbose=verbose,
        target_flags=target_flags,
        sampling=sampling,
    )
