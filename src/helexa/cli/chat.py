"""`helexa chat`: a conversation on the terminal, or one answer on stdout."""

import sys
from contextlib import closing
from typing import Annotated

from cyclopts import Parameter

from helexa.cli.conversation import Conversation
from helexa.cli.failure import USAGE, CommandError
from helexa.cli.gateway import Gateway
from helexa.cli.model_choice import choose_model
from helexa.cli.terminal import note

_MAX_STDIN_CHARACTERS = 16 * 1024 * 1024


def chat(
    prompt: str | None = None,
    /,
    *,
    model: Annotated[str | None, Parameter(alias="-m")] = None,
    url: str | None = None,
    system: Annotated[str | None, Parameter(alias="-s")] = None,
    temperature: float | None = None,
    seed: int | None = None,
    max_tokens: int | None = None,
) -> int:
    """Chat with a model, or ask it for one answer.

    Without PROMPT on a terminal this is a conversation. With PROMPT, or with text piped in, one answer goes to
    stdout and everything else to stderr. HELEXA_API_KEY holds the key where the gateway wants one.

    Args:
        prompt: What to ask; text piped in is added below it.
        model: Model to ask; without it, the first loaded one.
        url: Gateway to ask, else HELEXA_BASE_URL, else http://127.0.0.1:31313.
        system: System prompt.
        temperature: Randomness; 0 always takes the likeliest token.
        seed: Makes sampling repeatable.
        max_tokens: Most tokens an answer may have.
    """
    gateway = Gateway.from_environment(url)
    options = {"temperature": temperature, "seed": seed, "max_tokens": max_tokens}
    options = {name: value for name, value in options.items() if value is not None}
    if prompt is None and sys.stdin.isatty() and sys.stdout.isatty():
        from helexa.cli.repl import Repl

        model = choose_model(gateway, model)
        return Repl(Conversation(gateway, model, system, options)).run()
    question = _question(prompt)
    conversation = Conversation(gateway, model or choose_model(gateway, None), system, options)
    _answer_once(conversation, question)
    return 0


def _question(prompt: str | None) -> str:
    parts = [prompt or ""]
    if not sys.stdin.isatty():
        piped = sys.stdin.read(_MAX_STDIN_CHARACTERS + 1)
        if len(piped) > _MAX_STDIN_CHARACTERS:
            raise CommandError("the text piped in is too long for any model")
        parts.append(piped)
    elif prompt is None:
        note("type the prompt; Ctrl-D on a line of its own ends it")
        parts.append(sys.stdin.read())
    question = "\n\n".join(part.strip("\r\n") for part in parts if part.strip())
    if not question:
        raise CommandError("nothing to ask: give a PROMPT or pipe in some text", USAGE)
    return question


def _answer_once(conversation: Conversation, question: str) -> None:
    end = ""
    try:
        with closing(conversation.ask(question)) as pieces:
            for piece in pieces:
                if not piece.thought:
                    sys.stdout.write(piece.text)
                    sys.stdout.flush()
                    end = piece.text or end
    finally:
        if end and not end.endswith("\n"):
            print()
    if conversation.stats and conversation.stats.finish_reason == "length":
        note("the answer stopped at the token limit")
