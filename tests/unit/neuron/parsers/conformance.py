"""What helexa does with the tool calls and the reasoning of each model family, measured.

`python tests/unit/neuron/parsers/conformance.py TEMPLATES` prints the table in `docs/models.md`, with the folder
`models/templates` of llama.cpp.
"""

import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from helexa.neuron.grammar import for_tools
from helexa.neuron.parsers.argument_values import strict_loads
from helexa.neuron.parsers.formats.tool_call_format import TOOL_CALL_FORMATS, find_tool_call_format
from helexa.neuron.parsers.parser import OutputParser
from helexa.neuron.parsers.reasoning import ReasoningMarks, find_reasoning_marks
from helexa.neuron.text.chat_template import ChatTemplate
from neuron.grammar.random_walks import accepts, byte_level
from neuron.parsers.piecewise_parsing import MESSAGE_FORMATS, JoinedEvent, parse_pieces, pieces_at
from neuron.parsers.tool_corpus import written

TOOLS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {"city": {"type": "string", "description": "City"}, "days": {"type": "integer"}},
        "required": ["city", "days"],
    },
    "clock": {
        "type": "object",
        "properties": {"zone": {"type": "string", "description": "Zone"}},
        "required": ["zone"],
    },
}
CALLS: list[tuple[str, dict[str, Any]]] = [("get_weather", {"city": "Zug", "days": 3}), ("clock", {"zone": "Rome"})]
ENDS = re.compile(
    r"<\|(?:im_end|eot_id|end_of_text|end|role_end|tool_response)\|?>|<END>|<seed:eos>|\[e~\[|<turn\|>|<\|end_header_id\|>\n\n"
    r"|<\|END_OF_TURN_TOKEN\|>"
)


@dataclass(frozen=True)
class Family:
    """A family of models with one tool-call format.

    Attributes:
        models: names of models for the table.
        template: name of a real chat template; "" if none is available to the tests.
        tokens: tokens of the vocabulary, for families whose template is not available or mentions no calls.
        excerpt: parts of the template that show the format, if the template is not available.
    """

    models: str
    template: str = ""
    tokens: frozenset[str] = frozenset()
    excerpt: str = ""

    def parts(self, templates: Mapping[str, str]) -> tuple[str, ReasoningMarks | None]:
        """Return the detected tool-call format and reasoning markers."""
        source = templates.get(self.template, self.excerpt)
        known = find_tool_call_format(self.tokens.__contains__, source)
        assert known is not None, self.models
        return known.name, find_reasoning_marks(self.tokens.__contains__, source)


THINK = {"<think>", "</think>"}
FAMILIES = [
    Family("Llama 3.1 to 3.3", "meta-llama-Llama-3.3-70B-Instruct"),
    Family("Qwen2.5", "Qwen-Qwen2.5-7B-Instruct"),
    Family("Qwen3", "Qwen-Qwen3-0.6B"),
    Family("Qwen3-Coder", "Qwen3-Coder"),
    Family("Qwen3.5, Qwen3.6, Qwen3.8", "Qwen3.5-4B"),
    Family("Mistral Nemo, Small", "Mistral-Small-3.2-24B-Instruct-2506"),
    Family("Ministral 3", "mistralai-Ministral-3-14B-Reasoning-2512"),
    Family("gpt-oss", "openai-gpt-oss-120b"),
    Family("Muse Glimmer", "", frozenset({"<|start|>", "<|message|>", "<|eom|>", "<|eot|>"})),
    Family("Gemma 4", "google-gemma-4-31B-it", frozenset({"<|channel>", "<channel|>"})),
    Family("GLM-4.5, GLM-4.6", "GLM-4.6"),
    Family("GLM-4.7", "GLM-4.7-Flash"),
    Family("MiniMax M2", "MiniMax-M2"),
    Family("LFM2, LFM2.5", "LFM2.5-8B-A1B"),
    Family("Granite 3", "ibm-granite-granite-3.3-2B-Instruct"),
    Family("Granite 4", "ibm-granite-granite-4.1"),
    Family("SmolLM3", "", frozenset({"<tool_call>", "</tool_call>", *THINK})),
    Family("Seed-OSS", "ByteDance-Seed-OSS"),
    Family("OLMo 3", "", frozenset({"<function_calls>", "</function_calls>", *THINK})),
    Family("Ernie 4.5", "", frozenset({"<tool_call>", "</tool_call>", "<response>", "</response>", *THINK})),
    Family("Hunyuan", "", frozenset(THINK), '<tool_calls>[{"name": <answer>'),
    Family("Apriel 1.5", "unsloth-Apriel-1.5"),
    Family("Phi-4-mini", "", frozenset({"<|tool_call|>", "<|/tool_call|>"})),
    Family("Command R, Command R+", "CohereForAI-c4ai-command-r-plus-tool_use"),
    Family("Command R7B, Command A", "CohereForAI-c4ai-command-r7b-12-2024-tool_use"),
    Family("Nemotron Nano 2", "NVIDIA-Nemotron-Nano-v2"),
    Family("Nemotron 3 Nano", "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"),
    Family("DeepSeek V3.1", "deepseek-ai-DeepSeek-V3.1"),
    Family("Kimi K2", "moonshotai-Kimi-K2"),
]


class Conformance:
    """Checks of one family."""

    def __init__(self, family: Family, templates: Mapping[str, str]) -> None:
        self.family = family
        self.format, self.marks = family.parts(templates)
        self.text = {count: _as_in_training(written(self.format, CALLS[:count])) for count in (1, 2)}
        self.source = templates.get(family.template, "")
        self._vocabulary = byte_level(sorted(TOOL_CALL_FORMATS[self.format].markers))

    def whole(self) -> bool:
        """Whether a whole answer with a call is parsed."""
        return self._calls([self.text[1]]) == CALLS[:1]

    def streamed(self) -> bool:
        """Whether the events of an answer do not depend on where it is cut."""
        text = self.text[2]
        expected = self._events([text])
        return all(self._events(pieces_at(text, [cut])) == expected for cut in range(1, len(text))) and bool(expected)

    def parallel(self) -> bool:
        """Whether two calls in one answer are parsed, and a grammar allows both."""
        return self._calls([self.text[2]]) == CALLS and self._accepts("required", self.text[2], parallel=True)

    def required(self) -> bool:
        """Whether a grammar requires a call."""
        return self._accepts("required", self.text[1]) and not self._accepts("required", "Hello.")

    def forced(self) -> bool:
        """Whether a grammar requires a call of one tool."""
        return self._accepts("get_weather", self.text[1]) and not self._accepts("clock", self.text[1])

    def none(self) -> bool:
        """Whether an answer to a request without tools has no calls."""
        known = TOOL_CALL_FORMATS[self.format] if self.format in MESSAGE_FORMATS else None
        return not self._calls([self.text[1]], OutputParser(known, reasoning=self.marks, tools={}))

    def strict(self) -> bool:
        """Whether a grammar enforces the schema of a strict tool."""
        wrong = self.text[1].replace("days", "hours")
        return self._accepts("auto", self.text[1], strict=True) and not self._accepts("auto", wrong, strict=True)

    def thinking(self) -> bool | None:
        """Whether reasoning before a call is parsed; None for models without reasoning."""
        if self.format == "harmony":
            text = "<|channel|>analysis<|message|>Hm.<|end|>"
        elif self.format == "muse_glimmer":
            text = " to=self<|message|>Hm.<|eom|><|start|>assistant"
        elif self.marks is None:
            return None
        else:
            text = f"{self.marks.open}{self.marks.label}\nHm.\n{self.marks.close}\n\n{''.join(self.marks.answer[:1])}"
        text += self.text[1] + ("" if self.marks is None else "".join(self.marks.answer[1:]))
        name, arguments = CALLS[0]
        return [event[:2] for event in self._events(text)] == [("thought", "Hm."), ("call", name)] and bool(arguments)

    def history(self) -> bool | None:
        """Whether calls and results in the history are rendered and parsed again; None without a template."""
        if not self.source:
            return None
        template = ChatTemplate(self.source, special_tokens={"bos_token": "<BEGIN>", "eos_token": "<END>"})
        offered = [
            {"type": "function", "function": {"name": name, "description": "A tool.", "parameters": schema}}
            for name, schema in TOOLS.items()
        ]
        calls = [
            {"id": f"call_{number}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for number, (name, arguments) in enumerate(CALLS)
        ]
        results = [
            {"role": "tool", "tool_call_id": f"call_{number}", "content": content}
            for number, content in reversed([*enumerate(("sunny", "noon"))])
        ]
        ask = {"role": "user", "content": "What now?"}
        text = template.render([ask, {"role": "assistant", "tool_calls": calls}, *results], tools=offered)
        turn = text.rpartition("What now?")[2]
        read = [call for part in ENDS.split(turn) for call in self._calls([part])]
        return read == CALLS and 0 < turn.find("sunny") < turn.find("noon")

    def _accepts(self, choice: str, text: str, *, parallel: bool = False, strict: bool = False) -> bool:
        grammar = for_tools(
            self.format, TOOLS, choice, parallel, strict=TOOLS if strict else (), token_id=self._vocabulary.token_id
        )
        return accepts(grammar, text, self._vocabulary)

    def _events(self, pieces: Iterable[str], reader: OutputParser | None = None) -> list[JoinedEvent]:
        known = TOOL_CALL_FORMATS[self.format]
        return parse_pieces(reader or OutputParser(known, reasoning=self.marks, tools=TOOLS), pieces)

    def _calls(self, pieces: Iterable[str], reader: OutputParser | None = None) -> list[tuple[str, Any]]:
        events = self._events(pieces, reader)
        return [(event[1], strict_loads(event[2])) for event in events if event[0] == "call"]


def _as_in_training(text: str) -> str:
    """Return the usual spelling of calls, which grammars require while parsers accept several."""
    text = text.removeprefix("<|python_tag|>").removeprefix("<|start|>assistant").removesuffix("<|call|>")
    text = text.removesuffix("<|eom|>").replace("<|eom|>\n", "<|eom|>")
    text = text.replace("\n</minimax:tool_call>\n<minimax:tool_call>", "")
    return text.replace("'", '"')


COLUMNS: dict[str, Callable[[Conformance], bool | None]] = {
    "whole": Conformance.whole,
    "streamed": Conformance.streamed,
    "parallel": Conformance.parallel,
    "required": Conformance.required,
    "forced": Conformance.forced,
    "none": Conformance.none,
    "strict": Conformance.strict,
    "with reasoning": Conformance.thinking,
    "history": Conformance.history,
}


def table(templates: Mapping[str, str]) -> str:
    """Return the Markdown table of all families and what helexa does with their calls."""
    lines = ["| Models | Format | " + " | ".join(COLUMNS) + " |", "|---|---|" + "---|" * len(COLUMNS)]
    for family in FAMILIES:
        checked = Conformance(family, templates)
        cells = [{True: "yes", False: "no", None: "-"}[check(checked)] for check in COLUMNS.values()]
        lines.append(f"| {family.models} | `{checked.format}` | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table({path.stem: path.read_text() for path in Path(sys.argv[1]).glob("*.jinja")}))
