"""`helexa chat` and `helexa run`: a conversation, or one answer."""

import sys
from dataclasses import dataclass

from cyclopts import Parameter

from helexa.cli.conversation import print_answers, prompt_text, report
from helexa.cli.flags_and_completion import (
    AskedModel,
    ModelName,
    Quiet,
    SamplingFlags,
    Switch,
    System,
    TargetFlags,
    Think,
    Verbose,
)
from helexa.cli.model_loading_and_download_bar import load_model
from helexa.cli.terminal_output_and_errors import USAGE, CommandError, printable
from helexa.generation.options import AskOptions


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ChatFlags:
    """Options of `chat` and `run`.

    Attributes:
        system: System prompt.
        think: Whether the model reasons before it answers, else the model's default.
        stats: Print token counts and durations of each answer on stderr.
        quiet: Print only errors on stderr.
        verbose: Print where the model runs on stderr.
    """

    system: System = None
    think: Think = None
    stats: Switch = False
    quiet: Quiet = False
    verbose: Verbose = False


def chat(
    prompt: str | None = None,
    /,
    *,
    model: AskedModel = None,
    flags: ChatFlags = ChatFlags(),
    target_flags: TargetFlags = TargetFlags(),  # noqa: B008
    sampling: SamplingFlags = SamplingFlags(),  # noqa: B008
) -> int:
    """Chat with a model, or ask it for one answer.

    Without PROMPT on a terminal, this starts a conversation. With PROMPT, or with text piped in, one answer goes to
    stdout and all messages go to stderr. HELEXA_API_KEY is the API key of the gateway.

    Args:
        prompt: Prompt; text piped in is appended.
        model: Model to ask, else HELEXA_MODEL, else the first loaded one, else helexa/small.
    """
    talking = prompt is None and sys.stdin.isatty() and sys.stdout.isatty()
    text = "" if talking else prompt_text(prompt)
    ready, target = load_model(target_flags, model, checked=talking, quiet=flags.quiet, verbose=flags.verbose)
    if talking:
        from helexa.cli.conversation import Conversation
        from helexa.cli.repl import Repl

        conversation = Conversation(ready, flags.system, sampling, flags.think)
        return Repl(conversation, target_flags, target, stats=flags.stats).run()
    options: AskOptions = {"sampling": sampling, "system": flags.system, "think": flags.think}
    answers = print_answers(ready, text, options)
    report(answers, stats=flags.stats, quiet=flags.quiet)
    return 0


def run(
    model: ModelName | None = None,
    prompt: str | None = None,
    /,
    *,
    flags: ChatFlags = ChatFlags(),
    target_flags: TargetFlags = TargetFlags(),  # noqa: B008
    sampling: SamplingFlags = SamplingFlags(),  # noqa: B008
) -> int:
    """Run a model, downloaded if missing: chat with it, or ask it for one answer.

    Without PROMPT on a terminal, this starts a conversation. With PROMPT, or with text piped in, one answer goes to
    stdout. Without MODEL on a terminal, this offers the best model that fits the free memory of this machine.

    Args:
        model: Model name: qwen3:8b, org/name, pypi:package or a path; else HELEXA_MODEL.
        prompt: Prompt; text piped in is appended.
    """
    if model is not None and " " in model and "/" not in model:
        text = f"'{printable(model[:40])}' is not a model; `helexa generate \"PROMPT\"` asks the default model"
        raise CommandError(text, USAGE)
    location = target_flags.location(model)
    if location.wanted_model is None and location.url is None:
        from helexa.cli.local_model import offered_model  # slow: imports the node's configuration

        ask = sys.stdin.isatty() and sys.stderr.isatty()
        model = offered_model(ask=ask, private=location.is_private, quiet=flags.quiet)
    return chat(prompt, model=model, flags=flags, target_flags=target_flags, sampling=sampling)
