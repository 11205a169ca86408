"""What a family's text may have looked like, given what was read out of it: regular expressions that must match it.

They allow nothing between events but the family's own syntax, so that lost, doubled or invented text shows.
"""

import json
import re
from collections.abc import Iterable

from helexa.neuron.events import OutputEvent, ReasoningDelta, TextDelta, ToolCallDelta, ToolCallStart

_e = re.escape
_GAP = r"(?:\s*<think>\s*</think>)*\s*(?:<think>\s*\Z)?"
_HARMONY_GAP = (
    r"(?:\s|<\|end\|>|<\|call\|>|<\|return\|>"
    r"|(?:<\|start\|>|<\|channel\|>| to=)(?:(?!<\|message\|>|<\|end\|>|<\|call\|>|<\|return\|>).)*<\|message\|>)*"
)


def respelling(family: str, events: Iterable[OutputEvent]) -> re.Pattern[str]:
    """Matches each text that `events` may have been read from."""
    gap = _HARMONY_GAP if family == "harmony" else _GAP
    parts: list[str] = []
    call: tuple[str, list[str]] | None = None
    for event in [*events, None]:
        if call is not None and not isinstance(event, ToolCallDelta):
            parts.append(_call(family, call[0], "".join(call[1])))
            call = None
        match event:
            case TextDelta(text):
                parts.append(_e(text))
            case ReasoningDelta(text) if family == "harmony":
                parts.append(_e(text))
            case ReasoningDelta(text):
                parts.append(rf"(?:<think>\s*)?{_e(text)}\s*(?:</think>\s*)?")
            case ToolCallStart(name=name):
                call = (name, [])
            case ToolCallDelta(arguments=arguments):
                assert call is not None
                call[1].append(arguments)
            case _:
                pass
    return re.compile(gap + "".join(part + gap for part in parts), re.DOTALL)


def _call(family: str, name: str, arguments: str) -> str:
    json_call = _json_call(name, arguments)
    name, written = _e(name), _e(arguments)
    match family:
        case "hermes" | "qwen_xml":
            xml = f"<function={name}>{_pairs(arguments, _PARAMETER, '</function>')}"
            return rf"(?:<tool_call>\s*)?(?:{json_call}|{xml})(?:[\s}}]*</tool_call>)?"
        case "glm":
            pair = r"<arg_key>{}</arg_key>\s*<arg_value>{}</arg_value>"
            return rf"<tool_call>\s*{name}{_pairs(arguments, pair, '</tool_call>')}"
        case "llama3_json":
            method = rf"{name}\.call\({_pairs(arguments, _KEYWORD, _BRACKET)}"
            return rf"(?:<\|python_tag\|>)?\s*(?:{json_call}\s*;?|{method})"
        case "pythonic":
            start = rf"(?:(?:<\|python_start\|>)?\s*\[|,)?\s*{name}\("
            return rf"{start}{_pairs(arguments, _KEYWORD, _BRACKET)}\s*\]?\s*(?:<\|python_end\|>)?"
        case "mistral":
            listed = rf"(?:\[TOOL_CALLS\]\s*\[|,)\s*{json_call}\s*\]?"
            return rf"(?:{listed}|\[TOOL_CALLS\]\s*{name}(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*{written})"
        case "deepseek":
            names = rf"(?:{name}<｜tool▁sep｜>|\w+<｜tool▁sep｜>{name}\s*```json\s*)"
            head = rf"(?:<｜tool▁calls▁begin｜>)?\s*<｜tool▁call▁begin｜>{names}"
            return rf"{head}{written}(?:\s*(?:```\s*)?<｜tool▁call▁end｜>(?:\s*<｜tool▁calls▁end｜>)?)?"
        case _:
            return f"(?:{written}|)" if arguments == "{}" else written


_PARAMETER = r"<parameter={}>\n?{}\n?(?:</parameter>)?"
_KEYWORD, _BRACKET = r",?\s*{}\s*=\s*{}\s*", r",?\s*\)"


def _json_call(name: str, arguments: str) -> str:
    named, given = rf'"name"\s*:\s*"{_e(name)}"\s*', rf'"(?:arguments|parameters)"\s*:\s*{_e(arguments)}\s*'
    forms = [rf"\{{\s*{named},\s*{given}\}}?", rf"\{{\s*{given},\s*{named}\}}"]
    if arguments == "{}":
        forms.append(rf'\{{\s*{named}(?:,\s*"arguments"\s*:\s*null\s*)?\}}')
    return f"(?:{'|'.join(forms)})"


def _pairs(arguments: str, form: str, end: str) -> str:
    """Keyed arguments: each in the notation `form`, and `end` if they are complete."""
    whole = arguments.endswith("}")
    if not whole:
        arguments += "}"
    try:
        pairs: list[tuple[str, object]] = json.loads(arguments, object_pairs_hook=list)
    except ValueError:
        return r"(?!)"  # they were not written one by one
    return "".join(r"\s*" + form.format(_e(key), _written(value)) for key, value in pairs) + (
        rf"\s*{end}" if whole else ""
    )


def _written(value: object) -> str:
    if isinstance(value, list) and value and isinstance(value[0], tuple):
        value = dict(value)
    forms = {json.dumps(value, ensure_ascii=False), repr(value)} | ({value} if isinstance(value, str) else set())
    return rf"\s*(?:{'|'.join(map(_e, forms))})\s*"
