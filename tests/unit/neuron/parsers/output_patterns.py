"""Regular expressions that match every text from which a list of output events may have been parsed.

Between events, the expressions allow only the syntax of the tool-call format. Lost, repeated or invented text therefore
fails to match.
"""

import json
import re
from collections.abc import Iterable

from helexa.neuron.output_events import OutputEvent, ReasoningDelta, TextDelta, ToolCallDelta, ToolCallStart

_e = re.escape
_GAP = r"(?:\s|<think>\s*</think>|</think>{empty})*(?:<think>\s*\Z)?"
_EMPTY_CALL = r"|<tool_call>\s*</tool_call>"
_EMPTY = dict.fromkeys(("hermes", "hermes_strict", "qwen_xml", "glm"), _EMPTY_CALL) | {
    "cohere": r"|<\|START_ACTION\|>\s*<\|END_ACTION\|>",
    "gemma4": r"|<\|tool_call>\s*<tool_call\|>",
    "hunyuan": r"|<tool_calls>\s*</tool_calls>",
    "minimax_m2": r"|<minimax:tool_call>\s*</minimax:tool_call>",
    "nemotron": r"|<TOOLCALL>\s*</TOOLCALL>",
    "olmo3": r"|(?:<function_calls>)?[\s,]*</function_calls>",
    "phi4_mini": r"|<\|tool_call\|>\s*<\|/tool_call\|>",
    "seed_oss": r"|<seed:tool_call>\s*</seed:tool_call>",
}
_MUSE_ENDS = r"<\|message\|>|<\|eom\|>|<\|eot\|>"
_MUSE_GAP = (
    rf"(?:\s|{_MUSE_ENDS}|(?:<\|start\|>| to=)(?:(?!{_MUSE_ENDS}).){{0,512}}(?:{_MUSE_ENDS}|\Z)|<\|start\|>"
    r"|<atem:function_calls>\s*</atem:function_calls>)*"
)
_HARMONY_ENDS = r"<\|message\|>|<\|end\|>|<\|call\|>|<\|return\|>"
_HARMONY_GAP = (
    rf"(?:\s|<\|constrain\|>|{_HARMONY_ENDS}"
    rf"|(?:<\|start\|>|<\|channel\|>| to=)(?:(?!{_HARMONY_ENDS}).){{0,512}}(?:{_HARMONY_ENDS}|\Z)"
    r"|<\|start\|>|<\|channel\|>)*"
)


def respelling(format_name: str | None, events: Iterable[OutputEvent]) -> re.Pattern[str]:
    """Return a pattern that matches every text from which `events` may have been parsed."""
    empty = _EMPTY.get(format_name or "", "")
    gaps = {"harmony": _HARMONY_GAP, "muse_glimmer": _MUSE_GAP}
    gap = gaps.get(format_name or "", _GAP.format(empty=empty))
    parts: list[str] = []
    call: tuple[str, list[str]] | None = None
    for event in [*events, None]:
        if call is not None and not isinstance(event, ToolCallDelta):
            parts.append(_call(format_name, call[0], "".join(call[1])))
            call = None
        match event:
            case TextDelta(text):
                parts.append(_e(text))
            case ReasoningDelta(text) if format_name in gaps:
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
        case "pythonic" | "lfm2" | "olmo3":
            first, last = _PYTHONIC_MARKS[format_name]
            start = rf"(?:(?:{first})?\s*\[?|,)?\s*{name}\("
            pythonic = rf"{start}{_pairs(arguments, _KEYWORD, _BRACKET)}\s*,?\s*\]?\s*(?:{last})?"
            listed = (
                rf"(?:{first}\s*(?:```(?:json)?\s*)?\[?\s*|,\s*)?{json_call}{_SURPLUS}\s*\]?(?:\s*```)?\s*(?:{last})?"
            )
            return rf"(?:{pythonic}|{listed})"
        case "cohere" | "command_r" | "granite" | "hunyuan" | "nemotron" | "phi4_mini":
            first, last = _JSON_MARKS[format_name]
            begin = rf"(?:(?:{first})\s*(?:```(?:json)?\s*)?\[?|,|;)?"
            return rf"{begin}\s*{json_call}{_SURPLUS}\s*;?\s*\]?(?:\s*```)?{_SURPLUS}\s*(?:{last})?"
        case "glm" | "seed_oss" | "minimax_m2" | "muse_glimmer":
            opener, head, pair, end, closer = _TAGGED[format_name]
            tagged = rf"{head.format(name)}\s*{_pairs(arguments, pair, end)}"
            listed = rf"(?:```(?:json)?\s*)?(?:\[|,)?\s*{json_call}{_SURPLUS}\s*;?\s*\]?(?:\s*```)?[\s}}]*"
            return rf"(?:{opener})?\s*(?:{tagged}|{listed})\s*(?:{closer})?"
        case "kimi_k2":
            head = rf"(?:<\|tool_calls_section_begin\|>)?\s*<\|tool_call_begin\|>\s*(?:functions\.)?{name}(?::\d+)?"
            tail = rf"{_SURPLUS}\s*(?:<\|tool_call_end\|>(?:\s*<\|tool_calls_section_end\|>)?)?"
            return rf"{head}\s*<\|tool_call_argument_begin\|>\s*{written}{tail}"
        case "gemma4":
            given = rf"\s*(?:\{{{_pairs(arguments, _GEMMA, _GEMMA_END)}|{written}{_SURPLUS})"
            return rf"<\|tool_call>\s*call:{name}{given}\s*(?:<tool_call\|>)?"
        case "mistral":
            listed = rf"(?:\[TOOL_CALLS\]\s*\[?|,)\s*{json_call}{_SURPLUS}\s*\]?"
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
_GEMMA, _GEMMA_END = (r",?\s*(?:{0}|<\|\"\|>{0}<\|\"\|>|\"{0}\")\s*:\s*", r"\s*"), r",?\s*\}?"
_PYTHONIC_MARKS = {
    "pythonic": (r"<\|python_start\|>", r"<\|python_end\|>"),
    "lfm2": (r"<\|tool_call_start\|>", r"<\|tool_call_end\|>"),
    "olmo3": ("<function_calls>", "</function_calls>"),
}
_JSON_MARKS = {
    "cohere": (r"<\|START_ACTION\|>", r"<\|END_ACTION\|>"),
    "command_r": ("Action:", ""),
    "granite": (r"<\|tool_call\|>", ""),
    "hunyuan": ("<tool_calls>", "</tool_calls>"),
    "nemotron": ("<TOOLCALL>", "</TOOLCALL>"),
    "phi4_mini": (r"<\|tool_call\|>|functools", r"<\|/tool_call\|>"),
}
# The opening tag, the text before the parameters, the texts around a parameter and after the parameters, and the
# closing tag.
_TAGGED = {
    "glm": (
        "<tool_call>",
        r"{}\s*",
        (r"<arg_key>{}</arg_key>\s*<arg_value>", r"(?:</arg_value>)?"),
        "",
        "</tool_call>",
    ),
    "seed_oss": (
        "<seed:tool_call>",
        "<function={}>",
        (r"<parameter={}>", r"(?:</parameter>)?"),
        "(?:</function>)?",
        "</seed:tool_call>",
    ),
    "minimax_m2": (
        "<minimax:tool_call>",
        '<invoke name="{}">',
        (r'<parameter name="{}">', r"(?:</parameter>)?"),
        "(?:</invoke>)?",
        "</minimax:tool_call>",
    ),
    "muse_glimmer": (
        "<atem:function_calls>",
        '<atem:invoke name="{}">',
        (r'<atem:parameter name="{}">', r"(?:</atem:parameter>)?"),
        "(?:</atem:invoke>)?",
        "</atem:function_calls>",
    ),
}


def _json_call(name: str, arguments: str) -> str:
    text = f"(?:{_json(arguments)}|{_e(json.dumps(arguments))})"
    name_member, arguments_member = (
        rf'"(?:tool_)?name"\s*:\s*"{_e(name)}"\s*{_EXTRA_MEMBERS}',
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
_HEAD = rf'(?:"(?:id|type|tool_call_id)"\s*:\s*{_any_json(3)}\s*,\s*)*'


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
    if form is _GEMMA and text:
        return r'<\|"\|>' + _e(json.loads(text + '"'))
    try:
        return _string(json.loads(text + '"'), form) if text else ""
    except ValueError:
        return _NOTHING


def _gemma_value(text: str) -> str:
    """Return a pattern for Gemma's spelling of a JSON value: keys without quotes, and other quotes around strings."""
    quote = r'(?:<\|"\|>|")?'
    tokens = (
        rf"\s*{quote}(?:{_e(json.loads(token))}|{_e(token[1:-1])}){quote}\s*"
        if token.startswith('"')
        else rf"\s*{_PYTHON.get(token, _e(token))}\s*"
        for token in _TOKEN.findall(text)
    )
    return "".join(tokens)


def _written(text: str, form: tuple[str, str]) -> str:
    if form is _GEMMA:
        return _gemma_value(text)
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
