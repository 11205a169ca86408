"""The conversation on a terminal: line editing, commands, and answers as they come."""

import sys
from collections.abc import Callable
from contextlib import closing, suppress

from helexa.cli.conversation import Conversation
from helexa.cli.failure import CommandError
from helexa.cli.model_choice import choose_model
from helexa.cli.state import state_folder
from helexa.cli.terminal import dim, note, printable

_PROMPT = ">>> "
_CONTINUED = "... "
_FENCE = '"""'
_HISTORY_LINES = 1000

_HELP = f"""\
/system [TEXT]  show or set the system prompt
/model [NAME]   list the models, or change to one
/retry          ask the last question again
/stats          what the last answer took
/clear          forget the conversation
/exit           leave (so does Ctrl-D)
{_FENCE}             begins and ends a text of several lines
Ctrl-C stops an answer; at the prompt, pressed twice, it leaves."""


class Repl:
    """Reads lines until the person leaves."""

    def __init__(self, conversation: Conversation) -> None:
        """`conversation` is carried on."""
        self._conversation = conversation
        self._interrupts = 0
        self._commands: dict[str, Callable[[str], None]] = {
            "/help": lambda _: print(_HELP),
            "/clear": self._clear,
            "/system": self._system,
            "/model": self._model,
            "/retry": self._retry,
            "/stats": lambda _: print(self._conversation.stats or "nothing has been answered yet"),
        }

    def run(self) -> int:
        """Talk until /exit, Ctrl-D or a second Ctrl-C; returns the exit code."""
        with _LineEditing([*self._commands, "/exit"]):
            print(dim(f"{printable(self._conversation.model)} (/help lists the commands)", sys.stdout))
            while True:
                try:
                    line = input(_PROMPT)
                    self._interrupts = 0
                    if line.strip() == "/exit":
                        return 0
                    if line.startswith("/"):
                        self._obey(line)
                    elif line.lstrip().startswith(_FENCE):
                        self._answer(self._fenced(line))
                    elif line.strip():
                        self._answer(line)
                except EOFError:
                    print()
                    return 0
                except KeyboardInterrupt:
                    print()
                    self._interrupts += 1
                    if self._interrupts > 1:
                        return 0
                    print(dim("Ctrl-C again, or Ctrl-D, leaves", sys.stdout))
                except CommandError as error:
                    print(f"error: {error}", file=sys.stderr)

    def _fenced(self, line: str) -> str:
        lines = [line.lstrip().removeprefix(_FENCE)]
        while not lines[-1].rstrip().endswith(_FENCE):
            lines.append(input(_CONTINUED))
        lines[-1] = lines[-1].rstrip().removesuffix(_FENCE)
        return "\n".join(lines).strip("\n")

    def _obey(self, line: str) -> None:
        name, _, argument = line.partition(" ")
        command = self._commands.get(name)
        if command is None:
            raise CommandError(f"unknown command {name}; /help lists them")
        command(argument.strip())

    def _answer(self, question: str) -> None:
        thinking = False
        try:
            with closing(self._conversation.ask(question)) as pieces:
                for piece in pieces:
                    if thinking and not piece.thought:
                        sys.stdout.write("\n\n")
                    thinking = piece.thought
                    sys.stdout.write(dim(piece.text, sys.stdout) if thinking else piece.text)
                    sys.stdout.flush()
        except KeyboardInterrupt:
            self._interrupts += 1
            print(dim(" [stopped]", sys.stdout))
            return
        except CommandError:
            print()
            raise
        print()
        if self._conversation.stats and self._conversation.stats.finish_reason == "length":
            note("the answer stopped at the token limit")

    def _clear(self, _: str) -> None:
        self._conversation.clear()
        print("forgotten")

    def _system(self, text: str) -> None:
        if text:
            self._conversation.system = text
        print(self._conversation.system or "there is no system prompt")

    def _model(self, name: str) -> None:
        if name:
            self._conversation.model = choose_model(self._conversation.gateway, name)
        for entry in self._conversation.gateway.models():
            mark = "*" if entry["id"] == self._conversation.model else " "
            print(f"{mark} {printable(entry['id'])}{'' if entry.get('loaded') else '  (not loaded)'}")

    def _retry(self, _: str) -> None:
        question = self._conversation.take_back()
        if question is None:
            raise CommandError("nothing to ask again")
        self._answer(question)


class _LineEditing:
    """Editing keys, completion of commands and a history that outlives the session, where Python has readline."""

    def __init__(self, words: list[str]) -> None:
        self._words = words

    def __enter__(self) -> None:
        try:
            import readline
        except ImportError:
            return
        readline.set_history_length(_HISTORY_LINES)
        readline.set_completer_delims(" ")
        readline.set_completer(self._complete)
        readline.parse_and_bind("tab: complete")
        with suppress(OSError):
            readline.read_history_file(state_folder() / "chat_history")

    def __exit__(self, *_: object) -> None:
        with suppress(ImportError, OSError):
            import readline

            file = state_folder() / "chat_history"
            file.touch(mode=0o600)
            readline.write_history_file(file)

    def _complete(self, text: str, index: int) -> str | None:
        matches = [word for word in self._words if text and word.startswith(text)]
        return matches[index] if index < len(matches) else None
