"""Text processing of one model: conversations to prompt tokens, tokens to text.

`OutputFormat` detects the reasoning and tool-call formats of the output.
"""

import asyncio
import contextvars
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import msgspec

from helexa.core.errors import HelexaError
from helexa.neuron.parsers.call_ids import MISTRAL_IDS, OPENAI_IDS
from helexa.neuron.parsers.formats.harmony_and_muse_glimmer import MessageFormat
from helexa.neuron.parsers.formats.hermes import Hermes
from helexa.neuron.parsers.formats.llama_json_and_mistral import Mistral
from helexa.neuron.parsers.formats.tool_call_format import ToolCallFormat, find_tool_call_format
from helexa.neuron.parsers.output import Tools
from helexa.neuron.parsers.parser import OutputParser
from helexa.neuron.parsers.reasoning import ReasoningMarks, find_reasoning_marks
from helexa.neuron.text.chat_template import CHATML, ChatTemplate, Message, TemplateError
from helexa.neuron.text.settings_and_sampling_defaults import Pooling, SamplingDefaults, TemplateSources, TextSettings
from helexa.neuron.text.tokenizer import Detokenizer, Encoder, Tokenizer
from helexa.neuron.text.tokenizer_sandbox import TokenizerSandbox

P = ParamSpec("P")
T = TypeVar("T")

_THREADS = 4
_TURN = 4096  # number of last prompt tokens that are searched for the beginning of the last turn
_TAIL = 16  # number of last prompt tokens that are searched for a reasoning marker if no turn begins in `_TURN` tokens

# Function that replaces the placeholders of images in a rendered prompt, given the prompt and the number of images.
InsertImages = Callable[[str, int], str]


@dataclass(frozen=True)
class TextCapabilities:
    """Whether a model's vocabulary and chat template support tool calls and reasoning."""

    tool_call: bool
    reasoning: bool


class ModelText:
    """The tokenizer, chat template and text settings that a model's files define."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template_source: str | None,
        sampling_defaults: SamplingDefaults,
        *,
        tool_use: str | None = None,
        special_tokens: Mapping[str, str] | None = None,
        pooling: Pooling = "mean",
    ) -> None:
        self.tokenizer = tokenizer  # converts text to token ids and back
        self.sampling_defaults = sampling_defaults  # sampling parameters that the model's publisher recommends
        self.pooling: Pooling = pooling  # method that combines hidden states into one embedding vector
        source = CHATML if template_source is None else template_source
        # chat template, which renders messages as text
        self.template = ChatTemplate(source, tool_use=tool_use, special_tokens=special_tokens)
        # reasoning format and tool-call format of the model's output
        self.output_format = OutputFormat(tokenizer, (template_source or "") + (tool_use or ""))
        # A model's template writes the beginning-of-sequence token. The fallback template does not.
        self._prefix = tokenizer.prefix if template_source is None else []
        self.sandbox: TokenizerSandbox | None = None  # the sandbox process that tokenizes; None if this process does
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="text")

    def start_process(self) -> None:
        """Start the sandbox process that tokenizes, if it has ended; ignore errors."""
        if self.sandbox is not None:
            with suppress(HelexaError, OSError):  # the next text starts the process, or gets the error
                self.sandbox.ids("", parse_special=False, continues=False)

    def end_process(self) -> None:
        """End the sandbox process if it is idle, to free its memory until the next text."""
        if self.sandbox is not None:
            self.sandbox.end_process()

    @property
    def capabilities(self) -> TextCapabilities:
        """Whether requests may use tool calls and reasoning."""
        return TextCapabilities(
            tool_call=self.output_format.tool_call_format is not None or self.template.mentions("tools"),
            reasoning=self.output_format.separates_reasoning or self.template.mentions("enable_thinking"),
        )

    @classmethod
    def open(cls, path: Path) -> "ModelText":
        """Read the text files of the model at `path`, and tokenize in this process.

        Args:
            path: a .gguf file, a directory with a tokenizer.json, or a directory with one GGUF model.

        Raises:
            ModelFileError: `path` contains no model, or its files are malformed or not supported.
        """
        from helexa.neuron.text.tokenizer_files import read_text_files  # imports the library `tokenizers`

        return cls.of(*read_text_files(path))

    @classmethod
    def of(cls, settings: TextSettings, encoder: Encoder, chat_template: str | None = None) -> "ModelText":
        """Return the text processing that `settings` define.

        If `chat_template` is a text, it replaces the chat templates of the model.
        """
        if chat_template is not None:
            settings = msgspec.structs.replace(settings, templates=TemplateSources(chat_template))
        text = cls(
            Tokenizer(settings.vocabulary, encoder),
            settings.templates.default,
            settings.sampling_defaults,
            tool_use=settings.templates.tool_use,
            special_tokens=settings.special_tokens,
            pooling=settings.pooling,
        )
        text.sandbox = encoder if isinstance(encoder, TokenizerSandbox) else None
        return text

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `function` in a thread of this model, with the context of the caller."""
        # Templates and tokenizers may be slow. Requests for other models do not wait for these threads.
        work = partial(contextvars.copy_context().run, function, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def prompt_ids(
        self,
        messages: Sequence[Message],
        /,
        tools: Sequence[Mapping[str, Any]] | None = None,
        insert_images: InsertImages | None = None,
        **template_kwargs: Any,
    ) -> list[int]:
        """Render `messages` with the chat template and return the token ids of the prompt.

        Args:
            tools: the available tools in the format of OpenAI's chat API.
            insert_images: replaces the placeholders of images; None for messages without images.
            template_kwargs: further arguments of `ChatTemplate.render`, and variables of the template.

        Raises:
            TemplateError: the template cannot render the messages.
            ModelFileError: see `Tokenizer.encode`.
        """
        text = self.template.render(messages, tools=tools, **template_kwargs)
        if insert_images is not None:
            text = insert_images(text, sum(map(_image_count, messages)))
        return [*self._prefix, *self.tokenizer.encode(text)]

    def prompt_and_turn_start(
        self,
        messages: Sequence[Message],
        /,
        tools: Sequence[Mapping[str, Any]] | None = None,
        insert_images: InsertImages | None = None,
        **template_kwargs: Any,
    ) -> tuple[list[int], int]:
        """Return the prompt and the length of its part before the last user message.

        For the arguments and errors, see `prompt_ids`. To find the part, the method renders the conversation again with
        another last user message. The length is 0 without a user message, or if the template rejects the other message.
        """
        prompt = self.prompt_ids(messages, tools, insert_images, **template_kwargs)
        last = next((index for index in reversed(range(len(messages))) if messages[index].get("role") == "user"), None)
        if last is None:
            return prompt, 0
        # The message is replaced and not left out: templates omit reasoning before the last user message, so without
        # the message, the two prompts would already differ at earlier reasoning.
        changed = {**messages[last], "content": _different_message(messages[last].get("content"))}
        ending = {"add_generation_prompt": True, "continue_final_message": False}
        try:
            other_prompt = self.prompt_ids(
                [*messages[:last], changed], tools, insert_images, **template_kwargs | ending
            )
        except TemplateError:
            return prompt, 0
        common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(prompt, other_prompt, strict=False)))
        return prompt, max(common - 1, 0)  # the last common token may contain the first characters of the message

    def part_at(
        self,
        tokens: Sequence[int],
        position: int,
        messages: Sequence[Message],
        /,
        tools: Sequence[Mapping[str, Any]] | None = None,
        insert_images: InsertImages | None = None,
        **template_kwargs: Any,
    ) -> tuple[int | None, str]:
        """Return index and role of the message to which a token of the prompt belongs.

        For a token of the tool definitions, return None and `tools`. Return None and "" if the token belongs to no
        message, or if the template rejects the changed conversations that are rendered for comparison.

        Args:
            tokens: the prompt that `prompt_ids` has returned for the other arguments.
            position: index of the token in `tokens`.
        """

        def rendered(changed: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None) -> str:
            text = self.template.render(changed, tools=tools, **template_kwargs)
            return text if insert_images is None else insert_images(text, sum(map(_image_count, changed)))

        def first_difference(index: int) -> int:
            return _common_length(
                text, rendered([*messages[:index], _changed(messages[index]), *messages[index + 1 :]], tools)
            )

        def with_other_tools(tools: Sequence[Mapping[str, Any]]) -> str:
            try:
                return rendered(messages, None)
            except TemplateError:  # some templates reject requests without tools
                return rendered(messages, [{**tools[0], "function": {**tools[0]["function"], "name": "0"}}])

        try:
            text = rendered(messages, tools)
            # The position is counted from the end, because tokens may precede the text of the template.
            end = len(text) - len(self.tokenizer.decode(tokens[position + 1 :], skip_special=False))
            # The token belongs to the last message whose change alters the text before the end of the token.
            index = bisect_left(range(len(messages)), end, key=first_difference) - 1
            start = first_difference(index) if index >= 0 else -1
            if tools and start < _common_length(text, with_other_tools(tools)) < end:
                return None, "tools"
        except HelexaError:
            return None, ""
        return (index, str(messages[index].get("role"))) if index >= 0 else (None, "")


def _changed(message: Message) -> Message:
    """Return a copy of `message` whose text differs in the first character."""
    changed = {**message, "content": _different_message(message.get("content"))}
    changed.pop("reasoning_content", None)
    if calls := message.get("tool_calls"):  # the ids stay, because templates check that results follow their calls
        changed["tool_calls"] = [{**call, "function": {"name": "0", "arguments": "{}"}} for call in calls]
    return changed


def _common_length(text: str, other: str) -> int:
    """Return the number of equal leading characters."""
    shorter = min(len(text), len(other))
    return bisect_left(range(shorter), True, key=lambda index: text[: index + 1] != other[: index + 1])


def _image_count(message: Message) -> int:
    content = message.get("content")
    return sum(part.get("type") == "image" for part in content) if isinstance(content, list) else 0


def _different_message(content: Any) -> str:
    """Return a text whose first character differs from that of `content`."""
    first = content[0] if isinstance(content, list) and content else content
    text = first.get("text") if isinstance(first, Mapping) else first
    return "1" if isinstance(text, str) and text.lstrip().startswith("0") else "0"


class OutputFormat:
    """The formats of a model's output, according to its vocabulary and chat template."""

    def __init__(self, tokenizer: Tokenizer, template: str) -> None:
        def is_token(text: str) -> bool:
            return tokenizer.token_id(text) is not None

        # Tool-call format, or None. The node's configuration may set another format.
        self.tool_call_format: ToolCallFormat | None = find_tool_call_format(is_token, template)
        # Markers around reasoning, such as `<think>`, or None. A `MessageFormat` has no such markers.
        self.reasoning = find_reasoning_marks(is_token, template)
        self._tokenizer = tokenizer
        self._inserted: dict[str, tuple[int, ...]] = {}

    @property
    def separates_reasoning(self) -> bool:
        """Whether the output marks reasoning, so that a parser can separate it."""
        return self.frames_calls or self.reasoning is not None

    @property
    def frames_calls(self) -> bool:
        """Whether the model writes all output as messages with headers (`MessageFormat`).

        A grammar for this format must include the headers.
        """
        return isinstance(self.tool_call_format, MessageFormat)

    @property
    def has_untagged_calls(self) -> bool:
        """Whether the tool-call format also has calls in plain JSON, without tags."""
        return isinstance(self.tool_call_format, Hermes) and self.tool_call_format.untagged

    @property
    def thought_marks(self) -> ReasoningMarks:
        """The markers to write around reasoning in a response's text; default `<think>`."""
        return self.reasoning or ReasoningMarks("<think>", "</think>")

    def end_of_reasoning(self, *, framed: bool = False) -> list[int]:
        """Return the tokens that the server inserts to end the model's reasoning.

        If `framed`, the header of the final message is omitted, because a grammar makes the model generate it.
        """
        text = f"\n{self.thought_marks.close}\n\n"
        if isinstance(known := self.tool_call_format, MessageFormat):
            text = known.thought_end + ("" if framed else known.final_header)
        if text not in self._inserted:  # every request needs the tokens, and tokenizing may be slow
            self._inserted[text] = tuple(self._tokenizer.encode(text, continues=True))
        return list(self._inserted[text])

    def is_inside(self, prompt: Sequence[int]) -> bool:
        """Return whether `prompt` ends inside reasoning, which the model continues."""
        return self.reasoning is not None and self.reasoning.opened_by(self._turn(prompt))

    def is_over(self, prompt: Sequence[int]) -> bool:
        """Return whether `prompt` ends with a message that has finished reasoning."""
        return self.reasoning is not None and self.reasoning.closed_by(self._turn(prompt))

    def parser(
        self,
        prompt: Sequence[int],
        tools: Tools,
        *,
        untagged: bool = True,
        structured: bool = False,
        may_reason: bool = True,
    ) -> OutputParser | None:
        """Return a parser for the output after `prompt`, None if the output is only text.

        Args:
            tools: the tools of the request. Without tools, calls are parsed only in a `MessageFormat`.
            untagged: whether to accept tool calls without the format's tags, if the format has them.
            structured: whether a grammar decides the text after the reasoning, so that markers in it are text.
            may_reason: whether the model may reason if the prompt has not begun the reasoning.
        """
        tool_call_format = self.tool_call_format if tools or self.frames_calls else None
        if tool_call_format is None and self.reasoning is None:
            return None
        inside, reasoned = self.is_inside(prompt), self.is_over(prompt)
        return OutputParser(
            tool_call_format,
            reasoning=self.reasoning,
            in_reasoning=inside,
            reasoned=reasoned,
            untagged=untagged and self.has_untagged_calls,
            structured=structured,
            may_reason=may_reason and not (structured and reasoned),
            tools=tools,
            new_id=(MISTRAL_IDS if isinstance(tool_call_format, Mistral) else OPENAI_IDS).random,
        )

    def _turn(self, prompt: Sequence[int]) -> str:
        """Return the text of the unfinished assistant message at the end of `prompt`."""
        # The message begins after the last added token, such as `<|im_start|>`, that is no reasoning marker.
        marks = ("", "") if self.reasoning is None else (self.reasoning.open, self.reasoning.close)
        for index in range(len(prompt) - 1, max(-1, len(prompt) - 1 - _TURN), -1):
            marker = self._tokenizer.added_text(prompt[index])
            if marker.strip() and marker not in marks:
                return self._tokenizer.decode(prompt[index + 1 :], skip_special=False)
        # The start of the message is unknown: only a marker at the end of the prompt is certain.
        end = self._tokenizer.decode(prompt[-_TAIL:], skip_special=False).rstrip()
        return next((mark for mark in marks if end.endswith(mark)), "")

    def detokenizer(self, parser: OutputParser | None) -> Detokenizer:
        """Return a detokenizer that keeps the control tokens that `parser` recognizes."""
        markers = parser.markers if parser else frozenset[str]()
        ids = {self._tokenizer.token_id(marker): marker.encode() for marker in markers}
        return Detokenizer(self._tokenizer, {token_id: text for token_id, text in ids.items() if token_id is not None})
