"""Random model outputs with tool calls in each tool-call format: valid calls, and calls with one mistake each."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

from helexa.neuron.parsers.formats.tool_call_format import TOOL_CALL_FORMATS

Arguments = dict[str, object]


class Tags(NamedTuple):
    """The texts before the parameters of a call, around a value, and after the parameters; and what ends a value."""

    head: str
    lead: str
    tail: str
    end: str
    inside: tuple[str, ...]


TAGGED = {
    "qwen_xml": Tags(
        "<tool_call>\n<function={}>",
        "<parameter={}>\n",
        "\n</parameter>",
        "</function>\n</tool_call>",
        ("</tool_call>", "<function=", "<tool_call>"),
    ),
    "seed_oss": Tags(
        "<seed:tool_call>\n<function={}>",
        "<parameter={}>",
        "</parameter>",
        "</function>\n</seed:tool_call>",
        ("</parameter>", "</function>", "</seed:tool_call>", "<parameter="),
    ),
    "glm": Tags(
        "<tool_call>{}",
        "<arg_key>{}</arg_key>\n<arg_value>",
        "</arg_value>",
        "</tool_call>",
        ("</arg_value>", "<arg_key>", "</tool_call>"),
    ),
    "minimax_m2": Tags(
        '<minimax:tool_call>\n<invoke name="{}">',
        '<parameter name="{}">',
        "</parameter>",
        "</invoke>\n</minimax:tool_call>",
        ("</parameter>", "<parameter name=", "</invoke>", "</minimax:tool_call>"),
    ),
    "muse_glimmer": Tags(
        '<|start|>assistant to={0}<|message|><atem:function_calls>\n<atem:invoke name="{0}">',
        '<atem:parameter name="{}">',
        "</atem:parameter>",
        "</atem:invoke>\n</atem:function_calls><|eom|>",
        ("</atem:parameter>", "<atem:parameter name=", "</atem:invoke>", "</atem:function_calls>"),
    ),
}
PYTHONIC = {
    "pythonic": ("<|python_start|>", "<|python_end|>"),
    "lfm2": ("<|tool_call_start|>", "<|tool_call_end|>"),
    "olmo3": ("<function_calls>", "</function_calls>"),
}
_JSON_MARKS = {
    "granite": ("<|tool_call|>", ""),
    "hunyuan": ("<tool_calls>", "</tool_calls>"),
    "nemotron": ("<TOOLCALL>", "</TOOLCALL>"),
    "phi4_mini": ("<|tool_call|>", "<|/tool_call|>"),
}

_MARKERS = sorted({marker for known in TOOL_CALL_FORMATS.values() for marker in (*known.markers, *known.openers)})
_PIECES = [
    *(
        "word ",
        "é日😀",
        '"',
        "'",
        "\\",
        "\n",
        "\t",
        "```json\n",
        "```",
        "{",
        "}}",
        "[",
        "]",
        ",",
        ":",
        '", "a": "',
        "'}",
    ),
    *(
        "\\n",
        "\\u00e9",
        "C:\\Users\\me",
        "^\\w+\\d$",
        "<",
        "</",
        "</think>",
        "<think>",
        "x</parameter>y",
        "\u2028",
        "\x7f",
    ),
    *_MARKERS,
    *("</tool_call>", "</tools>", "// no", "# no", "1e5", "null", "True", "$HOME", "%s", "\r\n", "\x01"),
]


@dataclass(frozen=True)
class Output:
    """The text that a model generates, and the tool calls in this text.

    Attributes:
        mistake: name of the mistake in the text; "" for a valid call.
        text: the text.
        calls: name and arguments of each tool call.
    """

    mistake: str
    text: str
    calls: list[tuple[str, Arguments]]


def outputs(format_name: str, random: Random, count: int) -> list[Output]:
    """Return `count` outputs in the tool-call format `format_name`: each kind of mistake in turn, and valid calls."""
    kinds = [lambda random: _valid(format_name, random), *_mistakes(format_name)]
    return [kinds[number % len(kinds)](random) for number in range(count)]


def _valid(format_name: str, random: Random) -> Output:
    calls = [_call(format_name, random) for _ in range(random.choice((1, 1, 2, 3)))]
    indent = random.choice((None, None, 2))
    return Output("", written(format_name, calls, indent=indent, ensure_ascii=random.random() < 0.3), calls)


def written(
    format_name: str, calls: Sequence[tuple[str, Arguments]], *, indent: int | None = None, ensure_ascii: bool = False
) -> str:
    """Return the text of valid calls in the tool-call format `format_name`."""
    if format_name in PYTHONIC:
        return _pythonic(format_name, [_keywords(name, given) for name, given in calls])
    if format_name == "gemma4":
        return "".join(_gemma(name, given) for name, given in calls)
    if format_name in TAGGED:
        return "\n".join(_tagged(format_name, name, given) for name, given in calls)
    texts = [(name, json.dumps(given, ensure_ascii=ensure_ascii, indent=indent)) for name, given in calls]
    return _framed(format_name, texts)


def _call(format_name: str, random: Random) -> tuple[str, Arguments]:
    text = "".join(random.choice(_PIECES) for _ in range(random.randrange(9)))
    if format_name == "gemma4":
        text = text.replace('<|"|>', "")
    if format_name in TAGGED:  # other closing tags end a value
        for tag in TAGGED[format_name].inside:
            text = text.replace(tag, "")
        text = text.strip("\n") if format_name == "qwen_xml" else text
        return "write_file", {"path": f"a{random.randrange(99)}", "content": text, "lines": [random.randrange(9), None]}
    content: Arguments = {"path": text, "content": text[::-1], "lines": [1.5, {text[:9]: [True, None, text]}, []]}
    weather: Arguments = {"city": text, "days": random.randrange(99), "metric": random.random() < 0.5}
    return random.choice([("write_file", content), ("get_weather", weather), ("ping", {})])


def _framed(format_name: str, calls: list[tuple[str, str]]) -> str:
    """Return the text of calls with the arguments in JSON."""
    match format_name:
        case "hermes" | "hermes_strict":
            return "\n".join(f"<tool_call>\n{_object(*call)}\n</tool_call>" for call in calls)
        case "untagged":
            return "\n".join(_object(*call) for call in calls)
        case "llama3_json":
            return "<|python_tag|>" + "; ".join(_object(*call, "parameters") for call in calls)
        case "granite" | "hunyuan" | "nemotron" | "phi4_mini":
            first, last = _JSON_MARKS[format_name]
            return f"{first}[{', '.join(_object(*call) for call in calls)}]{last}"
        case "cohere":
            listed = ",".join(
                f'\n    {{"tool_call_id": "{number}", "tool_name": "{name}", "parameters": {text}}}'
                for number, (name, text) in enumerate(calls)
            )
            return f"<|START_ACTION|>[{listed}\n]<|END_ACTION|>"
        case "command_r":
            listed = ",".join(
                f'\n    {{\n        "tool_name": "{name}",\n        "parameters": {text}\n    }}'
                for name, text in calls
            )
            return f"Action: ```json\n[{listed}\n]\n```"
        case "kimi_k2":
            inner = "".join(
                f"<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>{text}<|tool_call_end|>"
                for number, (name, text) in enumerate(calls)
            )
            return f"<|tool_calls_section_begin|>{inner}<|tool_calls_section_end|>"
        case "mistral":
            return f"[TOOL_CALLS][{', '.join(_object(*call) for call in calls)}]"
        case "mistral_named":
            return "".join(f"[TOOL_CALLS]{name}[ARGS]{text}" for name, text in calls)
        case "deepseek":
            inner = "\n".join(
                f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{text}\n```<｜tool▁call▁end｜>"
                for name, text in calls
            )
            return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>"
        case _:
            return "".join(
                f"<|start|>assistant<|channel|>commentary to=functions.{name} <|constrain|>json"
                f"<|message|>{text}<|call|>"
                for name, text in calls
            )


def _object(name: str, text: str, key: str = "arguments") -> str:
    return f'{{"name": "{name}", "{key}": {text}}}'


def _pythonic(format_name: str, calls: list[str]) -> str:
    first, last = PYTHONIC[format_name]
    return f"{first}\n{chr(10).join(calls)}\n{last}" if format_name == "olmo3" else f"{first}[{', '.join(calls)}]{last}"


def _keywords(name: str, arguments: Arguments) -> str:
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"


def _tagged(format_name: str, name: str, arguments: Arguments) -> str:
    """Return the text of a call with one tag per argument."""
    tags = TAGGED[format_name]
    written = {key: value if isinstance(value, str) else json.dumps(value) for key, value in arguments.items()}
    parameters = "".join(f"{tags.lead.format(key)}{text}{tags.tail}\n" for key, text in written.items())
    return f"{tags.head.format(name)}\n{parameters}{tags.end}"


def _gemma(name: str, arguments: Arguments) -> str:
    return f"<|tool_call>call:{name}{_gemma_value(arguments)}<tool_call|>"


def _gemma_value(value: object) -> str:
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, list):
        return f"[{','.join(map(_gemma_value, value))}]"
    if isinstance(value, dict):
        keys = {key: key if key.isidentifier() else f'<|"|>{key}<|"|>' for key in value}
        return f"{{{','.join(f'{keys[key]}:{_gemma_value(item)}' for key, item in value.items())}}}"
    return json.dumps(value)


Mistake = tuple[str, str, Arguments]
"""Name of a mistake, the text of the arguments, and the intended arguments."""

_PATHS = ["C:\\Users\\me", "D:\\Work\\notes\\today.txt", "\\\\w+\\s*", "^\\d{3}-\\w+$", "\\[x\\]", "\\.py\\Z"]
_QUOTED = ['say "hi" to', 'a "b", c', '"x"-y', 'f("a", "b")', 'he said "no"', '<a href="x">']
_WEATHER: Arguments = {"city": "Paris", "days": 5}


def _wrong_json(random: Random) -> list[Mistake]:
    """Return arguments of the tool `get_weather` in JSON, each with one mistake."""
    path, quoted = random.choice(_PATHS[:2] + _PATHS[3:]), random.choice(_QUOTED)
    return [
        ("escape", f'{{"city": "{path}", "days": 5}}', {"city": path, "days": 5}),
        ("escaped_apostrophe", '{"city": "it\\\'s", "days": 5}', {"city": "it's", "days": 5}),
        ("trailing_comma", '{"city": "Paris", "days": 5,}', _WEATHER),
        ("missing_comma", '{"city": "Paris" "days": 5}', _WEATHER),
        (
            "literals",
            '{"city": "x", "metric": True, "a": None, "b": NaN}',
            {"city": "x", "metric": True, "a": None, "b": None},
        ),
        ("quotes", f'{{"city": "{quoted}", "days": 5}}', {"city": quoted, "days": 5}),
        ("last_quotes", f'{{"days": 5, "city": "{quoted}"}}', {"days": 5, "city": quoted}),
        ("doubled_braces", '{{"city": "Paris", "days": 5}}', _WEATHER),
        ("float", '{"city": "Paris", "days": 5.0}', _WEATHER),
        ("quoted_number", '{"city": "Paris", "days": "5"}', _WEATHER),
        ("single_quotes", "{'city': 'Paris', 'days': 5}", _WEATHER),
        ("bare", "{city: Paris, days: 5}", _WEATHER),
        ("control", '{"city": "a\n\tb\x01", "days": 5}', {"city": "a\n\tb\x01", "days": 5}),
        ("triple_quotes", '{"city": """a "b"\n""", "days": 5}', {"city": 'a "b"\n', "days": 5}),
        ("missing_bracket", '{"city": "x", "b": [1, {"c": 2}}', {"city": "x", "b": [1, {"c": 2}]}),
        ("surplus_brace", '{"city": "Paris", "days": 5}}', _WEATHER),
    ]


def _mistakes(format_name: str) -> list[Callable[[Random], Output]]:
    if format_name == "qwen_xml":
        return [
            lambda random, number=number: _wrong_xml(random)[number] for number in range(len(_wrong_xml(Random(0))))
        ]
    if format_name in TAGGED:
        return [lambda _, wrong=wrong: wrong for wrong in _wrong_tagged(format_name)]
    if format_name in PYTHONIC:
        return [lambda _, wrong=wrong: wrong for wrong in _wrong_pythonic(format_name)]
    if format_name == "gemma4":
        return [lambda _, wrong=wrong: wrong for wrong in _WRONG_GEMMA]

    def wrong_arguments(random: Random, number: int) -> Output:
        mistake, text, arguments = _wrong_json(random)[number]
        return Output(mistake, _framed(format_name, [("get_weather", text)]), [("get_weather", arguments)])

    def wrong_call(random: Random, number: int) -> Output:
        mistake, text, calls = _wrong_calls(format_name)[number]
        return Output(mistake, text, [("get_weather", _WEATHER)] * calls)

    return [
        *(
            lambda random, number=number: wrong_arguments(random, number)
            for number in range(len(_wrong_json(Random(0))))
        ),
        *(lambda random, number=number: wrong_call(random, number) for number in range(len(_wrong_calls(format_name)))),
    ]


def _wrong_calls(format_name: str) -> list[tuple[str, str, int]]:
    """Return mistakes outside of the arguments: name, text, and number of calls of `get_weather`."""
    text = json.dumps(_WEATHER)
    if format_name not in ("hermes", "hermes_strict"):
        return []
    call = _object("get_weather", text)
    return [
        ("fence", f"<tool_call>\n```json\n{call}\n```\n</tool_call>", 1),
        ("list", f"<tool_call>\n[{call}, {call}]\n</tool_call>", 2),
        ("two_objects", f"<tool_call>\n{call}\n{call}\n</tool_call>", 2),
        ("doubled_call", f"<tool_call>\n{{{call}}}\n</tool_call>", 1),
        ("tools_tag", f"<tools>\n{call}\n</tools>", 1),
        ("string", f"<tool_call>\n{_object('get_weather', json.dumps(text))}\n</tool_call>", 1),
        ("unescaped_string", f"<tool_call>\n{_object('get_weather', chr(34) + text + chr(34))}\n</tool_call>", 1),
        ("unclosed_reasoning", f"<think>\nI call.\n<tool_call>\n{call}\n</tool_call>", 1),
        ("no_end_tag", f"<tool_call>\n{call}", 1),
        ("wrong_end_tag", f"<tool_call>\n{call}\n<tool_call>", 1),
        ("two_tags", f"<tool_call>\n<tool_call>\n{call}\n</tool_call>\n</tool_call>", 1),
        ("no_braces", f"<tool_call>\n{call[:-2]}\n</tool_call>", 1),
    ]


def _wrong_xml(random: Random) -> list[Output]:
    inner = random.choice(
        ["a</parameter>b", "x </parameter> y", "b </tool_call> z", "a </function> b", "b <parameter=q> c"]
    )
    weather = ("get_weather", _WEATHER)
    parameters = "<parameter=city>\nParis\n</parameter>\n<parameter=days>\n5\n</parameter>\n"
    head, tail = "<tool_call>\n<function=get_weather>\n", "</function>\n</tool_call>"
    file: Arguments = {"path": "a", "content": inner, "lines": [1, 2]}
    lines = _tagged("qwen_xml", "write_file", file).replace("[1, 2]", "[1, 2,]")
    return [
        Output("tag_in_value", _tagged("qwen_xml", "write_file", file), [("write_file", file)]),
        Output("trailing_comma", lines, [("write_file", file)]),
        Output("float", head + parameters.replace("5", "5.0") + tail, [weather]),
        Output("no_function_end", head + parameters + "</tool_call>", [weather]),
        Output("no_parameter_end", head + parameters.replace("</parameter>\n", "") + tail, [weather]),
        Output("no_open_tag", head.removeprefix("<tool_call>\n") + parameters + tail, [weather]),
        Output("json", f"<tool_call>\n{_object('get_weather', json.dumps(_WEATHER))}\n</tool_call>", [weather]),
        Output("unclosed_reasoning", f"<think>\nHm.\n{head}{parameters}{tail}", [weather]),
    ]


def _wrong_tagged(format_name: str) -> list[Output]:
    weather = ("get_weather", _WEATHER)
    call = _tagged(format_name, *weather)
    tags = TAGGED[format_name]
    opener, closer = tags.head.split("\n")[0].removesuffix("{}").format("get_weather"), tags.end.split("\n")[-1]
    thought = "<|start|>assistant to=self<|message|>Hm." if format_name == "muse_glimmer" else "<think>\nHm.\n"
    json_call = _object("get_weather", json.dumps(_WEATHER))
    return [
        Output("float", call.replace("5", "5.0"), [weather]),
        Output("no_parameter_end", call.replace(f"{tags.tail}\n", ""), [weather]),
        Output("no_block_end", call.removesuffix(closer).rstrip(), [weather]),
        Output("one_line", call.replace("\n", ""), [weather]),
        Output("json", f"{opener}\n{json_call}\n{closer}", [weather]),
        Output("json_list", f"{opener}[{json_call}, {json_call}]{closer}", [weather, weather]),
        Output("two_blocks", f"{call}{call}", [weather, weather]),
        Output("unclosed_reasoning", thought + call, [weather]),
    ]


_WRONG_GEMMA = [
    Output(mistake, f"<|tool_call>call:get_weather{given}", [("get_weather", _WEATHER)])
    for mistake, given in [
        ("plain_quotes", '{city:"Paris",days:5}<tool_call|>'),
        ("quoted_keys", '{<|"|>city<|"|>:<|"|>Paris<|"|>,<|"|>days<|"|>:5}<tool_call|>'),
        ("spaces", '{ city: <|"|>Paris<|"|>, days: 5 }<tool_call|>'),
        ("json", '{"city": "Paris", "days": 5}<tool_call|>'),
        ("doubled_braces", '{{"city": "Paris", "days": 5}}<tool_call|>'),
        ("bare", "{city:Paris,days:5}<tool_call|>"),
        ("float", '{city:<|"|>Paris<|"|>,days:5.0}<tool_call|>'),
        ("trailing_comma", '{city:<|"|>Paris<|"|>,days:5,}<tool_call|>'),
        ("no_brace", '{city:<|"|>Paris<|"|>,days:5<tool_call|>'),
        ("no_end", '{city:<|"|>Paris<|"|>,days:5}'),
    ]
]


def _wrong_pythonic(format_name: str) -> list[Output]:
    def call(mistake: str, keywords: str, arguments: Arguments) -> Output:
        return Output(mistake, _pythonic(format_name, [f"get_weather({keywords})"]), [("get_weather", arguments)])

    first, last = PYTHONIC[format_name]

    return [
        call("quotes", 'city="say "hi" to", days=5', {"city": 'say "hi" to', "days": 5}),
        call("literals", "city='x', metric=true, a=null, b=NaN", {"city": "x", "metric": True, "a": None, "b": None}),
        call("float", "city='Paris', days=5.0", _WEATHER),
        call("trailing_comma", "city='Paris', days=5,", _WEATHER),
        call("bare", "city=Paris, days=5", _WEATHER),
        call("escape", r"city='C:\Users\me', days=5", {"city": r"C:\Users\me", "days": 5}),
        call("concatenation", "city='Pa' + 'ris', days=5", _WEATHER),
        *(
            Output(mistake, first + text + last, [("get_weather", _WEATHER)])
            for mistake, text in [
                ("no_bracket", "[get_weather(city='Paris', days=5)"),
                ("comma_after_call", "[get_weather(city='Paris', days=5),]"),
            ]
            if format_name != "olmo3"
        ),
    ]
