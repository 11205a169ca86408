"""The interactive loop of a conversation on a terminal: line editing and streamed responses."""

import sys
from contextlib import closing, suppress

from helexa.cli.conversation.answer_printer import report
from helexa.cli.conversation.chat_commands import ChatCommands
from helexa.cli.conversation.conversation import Content, Conversation
from helexa.cli.flags import TargetFlags
from helexa.cli.local.state_folder import state_folder
from helexa.cli.terminal import dim, printable
from helexa.core.errors import HelexaError
from helexa.generation.target import Target

_PROMPT = ">>> "
_CONTINUED = "... "
_FENCE = '"""'
_HISTORY_LINES = 1000


class Repl:
    """The interactive loop of a conversation: reads the user's lines and prints responses until the user exits."""

    def __init__(
        self, conversation: Conversation, target_flags: TargetFlags, target: Target, *, stats: bool = False
    ) -> None:
        """Create the loop.

        Args:
            conversation: the conversation.
            target_flags: command line options that select the server or private engine.
            target: the server or private engine that runs the model.
            stats: whether to print token counts and durations of each response.
        """
        self._conversation = conversation
        self._commands = ChatCommands(conversation, target_flags, target, self._respond)
        self._stats = stats
        self._interrupts = 0

    def run(self) -> int:
        """Run the loop until /exit, Ctrl-D or a second Ctrl-C, and return the exit code of the command."""
        with _LineEditing(self._commands.names):
            print(dim(f"{printable(self._commands.target.model)} (/help lists the commands)", sys.stdout))
            while True:
                try:
                    line = input(_PROMPT)
                    self._interrupts = 0
                    if line.strip() in ("/exit", "/bye"):
                        return 0
                    if line.startswith("/"):
                        self._commands.obey(line)
                    elif line.lstrip().startswith(_FENCE):
                        self._respond(self._fenced(line))
                    elif line.strip():
                        self._respond(line)
                except EOFError:
                    print()
                    return 0
                except KeyboardInterrupt:
                    print()
                    self._interrupts += 1
                    if self._interrupts > 1:
                        return 0
                    print(dim("press Ctrl-C again or Ctrl-D to exit", sys.stdout))
                except (HelexaError, OSError) as error:
                    print(f"error: {printable(' '.join(str(error).split()))}", file=sys.stderr)

    def _fenced(self, line: str) -> str:
        lines = [line.lstrip().removeprefix(_FENCE)]
        while not lines[-1].rstrip().endswith(_FENCE):
            lines.append(input(_CONTINUED))
        lines[-1] = lines[-1].rstrip().removesuffix(_FENCE)
        return "\n".join(lines).strip("\n")

    def _respond(self, message: Content) -> None:
        thinking = False
        try:
            with closing(self._conversation.ask(message)) as pieces:
                for delta in pieces:
                    if thinking and not delta.thought:
                        sys.stdout.write("\n\n")
                    thinking = delta.thought
                    sys.stdout.write(dim(delta.text, sys.stdout) if thinking else delta.text)
                    sys.stdout.flush()
        except KeyboardInterrupt:
            self._interrupts += 1
            print(dim(" [stopped]", sys.stdout))
            return
        except HelexaError:
            print()
            raise
        print()
        if self._conversation.last:
            report([self._conversation.last], stats=self._stats, quiet=False)


class _LineEditing:
    """A context manager that sets up line editing, completion of slash commands, and a history file.

    If Python was built without readline, it does nothing.
    """

    def __init__(self, candidates: list[str]) -> None:
        self._candidates = candidates

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
        matches = [candidate for candidate in self._candidates if text and candidate.startswith(text)]
        return matches[index] if index < len(matches) else None
