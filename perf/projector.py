"""Measure the CPU time per token from the engine's output to the bytes of the HTTP response, as JSON lines.

usage: python perf/projector.py MODEL [--rounds 9] [--tokens 4000]

The measured code is the detokenizer, the parser of reasoning and tool calls, and the projector, which converts the
parsed output to an API format. MODEL is a value of `neuron --model`; the script reads only its vocabulary.

The simulated output of the model is source code, one token at a time, in four kinds: as text, as reasoning before an
answer, and as the argument of a tool call in a JSON format (`hermes`) and in a format with tags (`qwen_xml`). The
script prints one line per kind of output and API format, with the CPU microseconds per token as the median over the
rounds. The verdict is the largest value, without the line with log-probabilities.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from support.local_model import local_path

from helexa.core.wire.responses_request import ResponsesRequest
from helexa.neuron.engine.ipc.messages import Logprob, TokenOutput
from helexa.neuron.output_events import Started
from helexa.neuron.parsers.formats.tool_call_format import TOOL_CALL_FORMATS
from helexa.neuron.requests.answer_reader import AnswerForm, AnswerReader
from helexa.neuron.routes.answer_formats import Projector
from helexa.neuron.routes.chat import ChatProjector
from helexa.neuron.routes.responses import ResponseProjector
from helexa.neuron.text.model_text import ModelText

THRESHOLD_US = 25.0
TOOLS: dict[str, Any] = {
    "write_file": {
        "type": "object",
        "properties": {"path": {"type": "string"}, "content": {"type": "string"}},
        "required": ["path", "content"],
    }
}
TEMPLATE = "{# <think>thoughts</think> #}{{ messages }}{{ tools }}"


def spelled(kind: str, code: str) -> str:
    """Return what a model would write to output `code` as this kind of output (text, reasoning or tool call)."""
    match kind:
        case "thought":
            return f"<think>\n{code}\n</think>\n\nDone."
        case "hermes":
            arguments = json.dumps({"path": "a.py", "content": code})
            return f'<tool_call>\n{{"name": "write_file", "arguments": {arguments}}}\n</tool_call>'
        case "qwen_xml":
            parameters = f"<parameter=path>\na.py\n</parameter>\n<parameter=content>\n{code}\n</parameter>\n"
            return f"<tool_call>\n<function=write_file>\n{parameters}</function>\n</tool_call>"
        case _:
            return code


def microseconds(text: ModelText, kind: str, tokens: list[int], api_format: str, alternatives: int | None) -> float:
    """Return the CPU time per token in microseconds, from the engine's outputs to the bytes of the HTTP response.

    Args:
        text: vocabulary and output format of the model.
        kind: kind of output: text, reasoning or tool call.
        tokens: token ids of the output.
        api_format: API format of the response, for example chat completions.
        alternatives: number of log-probabilities per token, or None for no log-probabilities.
    """
    text.output_format.tool_call_format = TOOL_CALL_FORMATS.get(kind)
    reader = AnswerReader(text, [], form=AnswerForm(TOOLS), logprobs=alternatives is not None)
    projector: Projector = ChatProjector("m") if api_format == "chat" else ResponseProjector("m", REQUEST)
    likely: list[Logprob] = [] if alternatives is None else [(-0.5, [(token, -1.0) for token in range(alternatives)])]
    outputs = [TokenOutput(id=1, tokens=[token], logprobs=likely) for token in tokens]
    projector.frames(Started(1))
    frames: Callable[[Any], bytes] = projector.frames
    begun = time.process_time()
    for output in outputs:
        for event in reader.read(output):
            frames(event)
    return (time.process_time() - begun) / len(outputs) * 1e6


REQUEST = ResponsesRequest.from_value({"model": "m", "input": "Write."})


def main() -> None:
    command = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    command.add_argument("model")
    command.add_argument("--rounds", type=int, default=9)
    command.add_argument("--tokens", type=int, default=4000)
    arguments = command.parse_args()
    tokenizer = ModelText.open(local_path(arguments.model)).tokenizer
    text = ModelText(tokenizer, TEMPLATE, {})
    code = (Path(__file__).with_name("support") / "sample.txt").read_text() * 10
    rows: dict[tuple[str, str, int | None], list[float]] = {
        (kind, api_format, None): []
        for kind in ("text", "thought", "hermes", "qwen_xml")
        for api_format in ("chat", "responses")
    }
    rows["text", "chat", 5] = []
    tokens_by_kind = {kind: tokenizer.encode(spelled(kind, code))[: arguments.tokens] for kind, _, _ in rows}
    for _ in range(arguments.rounds):
        for (kind, api_format, alternatives), times in rows.items():
            times.append(microseconds(text, kind, tokens_by_kind[kind], api_format, alternatives))
    for (kind, api_format, alternatives), times in rows.items():
        row = {
            "row": kind,
            "api_format": api_format,
            "top_logprobs": alternatives,
            "us_per_token": round(median(times), 1),
        }
        print(json.dumps(row))
    worst = max(median(times) for (_, _, alternatives), times in rows.items() if alternatives is None)
    print(
        json.dumps(
            {
                "verdict": "microseconds a token",
                "value": round(worst, 1),
                "threshold": THRESHOLD_US,
                "holds": worst <= THRESHOLD_US,
            }
        )
    )


if __name__ == "__main__":
    main()
