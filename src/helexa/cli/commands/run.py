"""`helexa run`: a certain model, fetched if it is not here; a conversation on a terminal, else one answer."""

from typing import Annotated

from cyclopts import Parameter

from helexa.cli.commands.chat import chat
from helexa.cli.commands.completion import ModelName
from helexa.cli.flags import Quiet, SamplingFlags, Switch, Verbose, Where


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
    where: Where = Where(),  # noqa: B008
    sampling: SamplingFlags = SamplingFlags(),  # noqa: B008
) -> int:
    """Run a model, which is fetched if it is not here: chat with it, or ask it for one answer.

    Without PROMPT on a terminal this is a conversation. With PROMPT, or with text piped in, one answer goes to stdout.

    Args:
        model: Its name: helexa/small, org/name, pypi:package or a path.
        prompt: What to ask; text piped in is added below it.
        system: System prompt.
        think: Whether the model thinks before it answers, else as it likes.
        stats: Say on stderr what each answer took.
        quiet: Say nothing on stderr but errors.
        verbose: Say on stderr where the model runs.
    """
    return chat(
        prompt,
        model=model,
        system=system,
        think=think,
        stats=stats,
        quiet=quiet,
        verbose=verbose,
        where=where,
        sampling=sampling,
    )
