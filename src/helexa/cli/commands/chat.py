"""`helexa chat`: a conversation with a model on the terminal, or one response on stdout."""

import sys
from typing import Annotated

from cyclopts import Parameter

from helexa.cli.commands.completion import ModelName
from helexa.cli.conversation.answer_printer import print_answers, report
from helexa.cli.flags import Quiet, SamplingFlags, Switch, TargetFlags, Verbose
from helexa.cli.model_loading import load_model
from helexa.cli.prompt_input import prompt_text


def chat(
    prompt: str | None = None,
    /,
    *,
    model: Annotated[ModelName | None, Parameter(alias="-m")] = None,
    system: Annotated[str | None, Parameter(alias="-s")] = None,
    think: bool | None = None,
    stats: Switch = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    target_flags: TargetFlags = TargetFlags(),  # noqa: B008
    sampling: SamplingFlags = SamplingFlags(),  # noqa: B008
) -> int:
    """Chat with a model, or ask it for one answer.

    Without PROMPT on a terminal, this starts a conversation. With PROMPT, or with text piped in, one answer goes to
    stdout and all messages go to stderr. HELEXA_API_KEY is the API key of the gateway.

    Args:
        prompt: Prompt; text piped in is appended.
        model: Model to ask, else HELEXA_MODEL, else the first loaded one, else helexa/small.
        system: System prompt.
        think: Whether the model reasons before it answers, else the model's default.
        stats: Print token counts and durations of each answer on stderr.
        quiet: Print only errors on stderr.
        verbose: Print where the model runs on stderr.
    """
    talking = prompt is None and sys.stdin.isatty() and sys.stdout.isatty()
    text = "" if talking else prompt_text(prompt)
    ready, target = load_model(target_flags, model, checked=talking, quiet=quiet, verbose=verbose)
    if talking:
        from helexa.cli.conversation.conversation import Conversation
        from helexa.cli.conversation.repl import Repl

        conversation = Conversation(ready, system, sampling.sampling(), think)
        return Repl(conversation, target_flags, target, stats=stats).run()
    answers = print_answers(ready, text, {"sampling": sampling.sampling(), "system": system, "think": think})
    report(answers, stats=stats, quiet=quiet)
    return 0
