"""Regular expressions that match every text from which a list of output events may have been parsed.

Between events, the expressions allow only the syntax of the tool-call format. Lost, repeated or invented text therefore
fails to match.
"""

import json
import re
from collections.abc import Iterable

from helexa.neuron.events import OutputEvent, ReasoningDelta, TextDelta, ToolCallDelta, ToolCallStart

_e = re.escape
_GAP = r"(?:\s|<think>\s*</think>|</think>{empty})*(?:<think>\s*\Z)?"
_EMPTY_CALL = r"|<tool_call>\s*</tool_call>"
_HARMONY_ENDS = r"<\|message\|>|<\|end\|>|<\|call\|>|<\|return\|>"
_HARMONY_GAP = (
    rf"(?:\s|<\|constrain\|>|{_HARMONY_ENDS}"
    rf"|(?:<\|start\|>|<\|channel\|>| to=)(?:(?!{_HARMONY_ENDS}).){{0,512}}(?:{_HARMONY_ENDS}|\Z)"
    r"|<\|start\|>|<\|channel\|>)*"
)


def respelling(format_name: str | None, events: Iterable[OutputEvent]) -> re.Pattern[str]:
    """Return a pattern that matches every text from which `events` may have been parsed."""
    empty = _EMPTY_CALL if format_name in ("hermes", "hermes_strict", "qwen_xml") else ""
    gap = _HARMONY_GAP if format_name == "harmony" else _GAP.format(empty=empty)
    parts: list[str] = []
    call: tuple[str, list[str]] | None = None
    for event in [*events, None]:
        if call is not None and not isinstance(event, ToolCallDelta):
            parts.append(_call(format_name, call[0], "".join(call[1])))
            call = None
        match event:
            case TextDelta(text):
                parts.append(_e(text))
            case ReasoningDelta(text) if format_name == "harmony":
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


def _call(format_name: str | None, name: str, arguments: str) -> str:
    json_call = _json_call(name, arguments)
    name, written = _e(name), _json(arguments)
    match format_name:
        case "hermes" | "hermes_strict" | "qwen_xml":
            xml = rf"<function={name}>{_pairs(arguments, _PARAMETER, '(?:</function>)?')}"
            tagged = rf"(?:<tool_call>\s*)?(?:{json_call}|{xml})(?:[\s}}]*</tool_call>)?"
            untagged = rf"(?:```(?:json)?\s*)?(?:\[\s*|,\s*)?{json_call}{_SURPLUS}\s*\]?(?:\s*```)?"
            return rf"(?:{tagged}|{untagged})" if format_name == "hermes" else tagged
        case "llama3_json":
            method = rf"{name}\.call\({_pairs(arguments, _KEYWORD, _BRACKET)}"
            return rf"(?:<\|python_tag\|>)?\s*(?:{json_call}{_SURPLUS}\s*;?|{method})"
        case "pythonic":
            start = rf"(?:(?:<\|python_start\|>)?\s*\[|,)?\s*{name}\("
            return rf"{start}{_pairs(arguments, _KEYWORD, _BRACKET)}\s*\]?\s*(?:<\|python_end\|>)?"
        case "mistral":
            listed = rf"(?:\[TOOL_CALLS\]\s*\[|,)\s*{json_call}{_SURPLUS}\s*\]?"
            name_member = rf"\[TOOL_CALLS\]\s*{name}(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*{written}{_SURPLUS}"
            return rf"(?:{listed}|{name_member})"
        case "deepseek":
            names = rf"(?:{name}<｜tool▁sep｜>|\w+<｜tool▁sep｜>\s*{name})\s*(?:```json\s*)?"
            head = rf"(?:<｜tool▁calls▁begin｜>)?\s*<｜tool▁call▁begin｜>{names}"
            tail = rf"{_SURPLUS}\s*(?:```\s*)?(?:<｜tool▁call▁end｜>(?:\s*<｜tool▁calls▁end｜>)?)?"
            return head + written + tail
        case _:
            return f"(?:{written}|){_SURPLUS}" if arguments == "{}" else f"{written}{_SURPLUS}"


# Patterns before and after a value. `{}` is the key.
_PARAMETER = (r"<parameter={}>\n?", r"\n?(?:</parameter>)?")
_KEYWORD, _BRACKET = (r",?\s*{}\s*=\s*", r"\s*"), r",?\s*\)"
_SURPLUS = r"(?:\s*\}){0,3}"


def _json_call(name: str, arguments: str) -> str:
    text = f"(?:{_json(arguments)}|{_e(json.dumps(arguments))})"
    name_member, arguments_member = (
        rf'"name"\s*:\s*"{_e(name)}"\s*{_EXTRA_MEMBERS}',
        rf'"(?:arguments|parameters)"\s*:\s*{text}\s*{_EXTRA_MEMBERS}',
    )
    hoisted = (
        rf'"arguments"\s*:\s*{_e("{")}"name":\s*"{_e(name)}"{_e(_after_first_member(arguments))}\s*{_EXTRA_MEMBERS}'
    )
    forms = [rf"{name_member},\s*{arguments_member}\}}?", rf"{arguments_member},\s*{name_member}\}}", rf"{hoisted}\}}"]
    if arguments == "{}":
        forms.append(rf'{name_member}(?:,\s*"arguments"\s*:\s*null\s*)?\}}')
    return rf"\{{\s*{_HEAD}(?:{'|'.join(forms)})"


def _after_first_member(arguments: str) -> str:
    """Return the text after the first member of an object whose remaining members are `arguments`."""
    return arguments[1:] if arguments == "{}" else f", {arguments[1:]}"


def _json(text: str) -> str:
    """Return a pattern for JSON text whose strings may contain raw line breaks and tabs."""
    return re.sub(r"\\\\([ntr])", r"(?:\\\\\1|\\\1)", _e(text))


def _any_json(depth: int) -> str:
    """Return a pattern for any JSON value with at most `depth` nested containers."""
    text = r'"(?:[^"\\]|\\.)*"'
    if not depth:
        return rf"(?:{text}|[\w.+-]+)"
    inner = _any_json(depth - 1)
    return rf"(?:{text}|[\w.+-]+|\[(?:\s*{inner}\s*,?)*\s*\]|\{{(?:\s*{text}\s*:\s*{inner}\s*,?)*\s*\}})"


# Additional members of a call: after its name or its arguments, and before them.
_EXTRA_MEMBERS = rf'(?:,\s*"(?:[^"\\]|\\.)*"\s*:\s*{_any_json(3)}\s*)*'
_HEAD = rf'(?:"(?:id|type)"\s*:\s*{_any_json(3)}\s*,\s*)*'


def _pairs(arguments: str, form: tuple[str, str], end: str) -> str:
    """Return a pattern for the arguments parsed so far, each in the syntax `form`, and `end` if they are complete."""
    head, tail = form
    parts: list[str] = []
    at = 0
    while key := _KEY.match(arguments, at):
        parts.append(r"\s*" + head.format(_e(json.loads(key.group(1)))))
        try:
            _, at = json.JSONDecoder().raw_decode(arguments, key.end())
        except ValueError:
            return "".join(parts) + _begun(arguments[key.end() :], form)
        parts.append(_written(arguments[key.end() : at], form) + tail)
    remainder = arguments[at:]
    if remainder == ("}" if parts else "{}"):
        return "".join([*parts, rf"\s*{end}"])
    return "".join(parts) if parts and not remainder else _NOTHING  # the text is not keyed arguments


_KEY = re.compile(r'(?:(?<!.)\{|, )("(?:[^"\\]|\\.)*"): ', re.DOTALL)
_NOTHING = r"(?!)"


def _begun(text: str, form: tuple[str, str]) -> str:
    """Return a pattern for a missing value or an incomplete string."""
    try:
        return _string(json.loads(text + '"'), form) if text else ""
    except ValueError:
        return _NOTHING


def _written(text: str, form: tuple[str, str]) -> str:
    forms = [_literal(text) if form is _KEYWORD else _PYTHON.get(text, _e(text))]
    if text.startswith('"'):
        forms.append(_string(json.loads(text), form))
    return rf"\s*(?:{'|'.join(forms)})\s*"


def _literal(text: str) -> str:
    """Return a pattern for Python spellings of a JSON value: tuples for arrays, parentheses, several lines."""
    joint = r"(?:[\s()]|\\\n)*"
    return joint + "".join(
        (_string(json.loads(token), _KEYWORD) if token.startswith('"') else _PYTHON.get(token, _e(token))) + joint
        for token in _TOKEN.findall(text)
    )


_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[\[\]{},:]|[^\s\[\]{},:"]+')
_PYTHON = {"true": "[Tt]rue", "false": "[Ff]alse", "null": "(?:null|None)", "[": r"[\[(]", "]": r",?\s*[\])]"}


def _string(value: str, form: tuple[str, str]) -> str:
    """Return a pattern for spellings of a string: literal, or with Python's escapes and adjacent string literals."""
    if form is not _KEYWORD:
        return _e(value)
    joint = r"(?:[\"']\s*|\\\n)*"
    return joint + "".join(rf"(?:{'|'.join(_spellings(char))}){joint}" for char in value)


_ESCAPED = {"\a": "a", "\b": "b", "\t": "t", "\n": "n", "\v": "v", "\f": "f", "\r": "r"}
_ESCAPED |= {char: char for char in "\\\"'/"}


def _spellings(char: str) -> list[str]:
    code = ord(char)
    units = re.sub("....", r"\\\\u\g<0>", char.encode("utf-16-be", "surrogatepass").hex())
    name_member = [rf"\\{_e(_ESCAPED[char])}"] if char in _ESCAPED else []
    return [_e(char), rf"\\0{{0,2}}{code:o}", rf"(?i:\\x{code:02x}|{units}|\\U{code:08x})", *name_member]
