"""The interactive loop of a conversation, and its slash commands."""

import sys
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from helexa.cli.conversation import Content, Conversation, report, stats_line
from helexa.cli.flags_and_completion import TargetFlags
from helexa.cli.gateway_client import Gateway
from helexa.cli.model_loading_and_download_bar import load_model
from helexa.cli.terminal_output_and_errors import CommandError, dim, printable
from helexa.cli.up_state_keys_and_logs import state_folder
from helexa.core.errors import HelexaError
from helexa.generation.request import image_part
from helexa.generation.target import Target

_HELP = """\
/system [TEXT]      show or set the system prompt
/image FILE         attach an image to the next message
/set [NAME VALUE]   show or set sampling options; VALUE default resets the option
/model [NAME]       list the models, or select one
/retry              send the last message again
/stats              token counts and durations of the last answer
/save FILE          save the conversation to a file
/load FILE          load a conversation from a file
/clear              delete all messages
/exit               exit (also: Ctrl-D)
\"""                 begin and end a text of several lines
Ctrl-C stops an answer. At the prompt, Ctrl-C twice exits."""

_INTEGER_SETTINGS = ("max_tokens", "top_k", "seed")
_UNSET = "default"
_YES, _NO = ("on", "yes", "true", "1"), ("off", "no", "false", "0")


class ChatCommands:
    """The slash commands of one conversation on the terminal."""

    def __init__(
        self, conversation: Conversation, target_flags: TargetFlags, target: Target, answer: Callable[[Content], None]
    ) -> None:
        """Create the commands.

        Args:
            conversation: the conversation that the commands change.
            target_flags: command line options that select the server or private engine.
            target: the server or private engine that runs the current model.
            answer: function that sends a message to the model and prints the response.
        """
        self.target = target  # the server or private engine that runs the current model
        self._conversation = conversation
        self._target_flags = target_flags
        self._answer = answer
        self._commands: dict[str, Callable[[str], None]] = {
            "/help": lambda _: print(_HELP),
            "/clear": self._clear,
            "/system": self._system,
            "/image": self._image,
            "/set": self._set,
            "/model": self._model,
            "/retry": self._retry,
            "/stats": self._stats,
            "/save": self._save,
            "/load": self._load,
        }
        self.names = [*self._commands, "/exit"]  # names of all commands, for completion

    def obey(self, line: str) -> None:
        """Run the slash command with which `line` begins, except `/exit`.

        Raises:
            HelexaError or a subclass, OSError: the command failed.
        """
        name, _, argument = line.partition(" ")
        command = self._commands.get(name)
        if command is None:
            raise CommandError(f"unknown command {name}; /help lists the commands")
        command(argument.strip())

    def _clear(self, _: str) -> None:
        self._conversation.clear()
        print("forgotten")

    def _system(self, text: str) -> None:
        if text:
            self._conversation.system = text
        print(printable(self._conversation.system or "there is no system prompt"))

    def _image(self, name: str) -> None:
        if not name:
            raise CommandError("/image needs a file, as in /image photo.jpg")
        self._conversation.images.append(image_part(name))
        count = len(self._conversation.images)
        print(f"the next message has {count} image{'' if count == 1 else 's'}")

    def _set(self, text: str) -> None:
        settings = asdict(self._conversation.sampling) | {"think": self._conversation.think}
        if text:
            name, _, value = text.partition(" ")
            name = name.replace("-", "_")
            if name not in settings or not value:
                raise CommandError(f"/set needs NAME and VALUE; NAME is one of {', '.join(settings)}")
            settings[name] = _setting(name, value.strip())
            self._conversation.think = settings["think"]
            options: Any = {key: setting for key, setting in settings.items() if key != "think"}
            self._conversation.sampling = replace(self._conversation.sampling, **options)
        for name, value in settings.items():
            if value is not None:
                print(f"{name} {value}")

    def _model(self, name: str) -> None:
        if name:
            self._conversation.model, self.target = load_model(self._target_flags, name, checked=True)
        for known, loaded in self._models().items():
            mark = "*" if known == self.target.model else " "
            print(f"{mark} {printable(known)}{'' if loaded else '  (not loaded)'}")

    def _models(self) -> dict[str, bool]:
        """Return the available models by name, and whether each is loaded."""
        if self.target.name.startswith("http"):
            entries = Gateway.from_environment(self.target.name).models()
            return {entry["id"]: entry.get("loaded") is not False for entry in entries}
        from helexa.cli.local_model import models_here

        loaded_by_name = {model.name: False for model in models_here() if model.path}
        return {**loaded_by_name, self.target.model: True}

    def _retry(self, _: str) -> None:
        message = self._conversation.take_back()
        if message is None:
            raise CommandError("there is no answer to repeat; write a message first")
        self._answer(message)

    def _stats(self, _: str) -> None:
        last = self._conversation.last
        print(stats_line(last) if last else "there is no complete answer yet")

    def _save(self, name: str) -> None:
        print(f"{self._conversation.save(_path(name))} messages saved")

    def _load(self, name: str) -> None:
        print(f"{self._conversation.load(_path(name))} messages loaded")


def _path(name: str) -> Path:
    if not name:
        raise CommandError("no file is named; write /save FILE or /load FILE, as in /save talk.json")
    try:
        return Path(name).expanduser()
    except RuntimeError:
        raise CommandError(f"{name}: there is no such home directory; write an absolute path") from None


def _setting(name: str, value: str) -> Any:
    if value == _UNSET:
        return None
    try:
        match name:
            case "stop":
                return value
            case "think" if value.lower() in _YES + _NO:
                return value.lower() in _YES
            case "think":
                raise ValueError
            case _:
                return int(value) if name in _INTEGER_SETTINGS else float(value)
    except ValueError:
        raise CommandError(f"'{value}' is not a valid value for {name}; /set shows the values") from None


_PROMPT = ">>> "
_CONTINUED = "... "
_FENCE = '"""'
_HISTORY_LINES = 1000


class Repl:
    """The interactive loop: reads lines and prints responses."""

    def __init__(
        self, conversation: Conversation, target_flags: TargetFlags, target: Target, *, stats: bool = False
    ) -> None:
        """Create the loop.

        Args:
            target_flags: command line options that select the server or private engine.
            target: the server or private engine that runs the model.
            stats: whether to print token counts and durations of each response.
        """
        self._conversation = conversation
        self._commands = ChatCommands(conversation, target_flags, target, self._respond)
        self._stats = stats
        self._interrupts = 0

    def run(self) -> int:
        """Run until /exit, Ctrl-D, or Ctrl-C twice without a line between. Return 0."""
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
    """A context manager for line editing, completion and a history file.

    If Python was built without readline, the context manager does nothing.
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
        with suppress(OSError, HelexaError):
            readline.read_history_file(state_folder() / "chat_history")

    def __exit__(self, *_: object) -> None:
        with suppress(ImportError, OSError, HelexaError):
            import readline

            file = state_folder() / "chat_history"
            file.touch(mode=0o600)
            readline.write_history_file(file)

    def _complete(self, text: str, index: int) -> str | None:
        matches = [candidate for candidate in self._candidates if text and candidate.startswith(text)]
        return matches[index] if index < len(matches) else None
