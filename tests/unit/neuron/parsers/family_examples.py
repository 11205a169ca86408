"""Model output in the tool-call formats of single model families, and the expected events."""

from neuron.parsers.piecewise_parsing import JoinedEvent

PARIS = ("call", "get_weather", '{"city": "Paris"}')
FORECAST = ("call", "get_weather", '{"city": "Paris", "days": 3, "metric": true}')
PING = ("call", "ping", "{}")
LOOK = ("text", "Let me look.\n")
Cases = list[tuple[str, list[JoinedEvent]]]

GLM: Cases = [
    (
        "<think>Hm.</think>\nLet me look.\n<tool_call>get_weather\n"
        "<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n<arg_key>metric</arg_key>\n<arg_value>true</arg_value>\n"
        "</tool_call>\n<tool_call>ping\n</tool_call>",
        [("thought", "Hm."), LOOK, FORECAST, PING],
    ),
    ("<tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris</arg_value></tool_call>", [PARIS]),
    (
        "<tool_call>write_file<arg_key>content</arg_key><arg_value>a\n</arg_value> b\n</arg_value></tool_call>",
        [("call", "write_file", '{"content": "a\\n</arg_value> b\\n"}')],
    ),
    ("Write <tool_call>name</tool_call>.", [("text", "Write <tool_call>name</tool_call>.")]),
    ("<tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris</arg_value>", [PARIS]),
    ("<tool_call>get_weather<arg_key>city</arg_key><arg_value>Par", [("call", "get_weather", '{"city": "Par')]),
    ("<tool_call>get_weather<arg_key>city</arg_key>Paris</tool_call>!", [PARIS, ("text", "!")]),
    ('<tool_call>{"name": "ping", "arguments": {}}</tool_call>', [PING]),
    ("<tool_call></tool_call>", []),
    ('<tool_call>get_weather\n{"city": "Paris"}\n</tool_call>', [PARIS]),
    # without `<arg_key>`
    ("<tool_call>get_weathercity</arg_key><arg_value>Paris</arg_value></tool_call>", [PARIS]),
    ("<tool_call>get_weather city</arg_key><arg_value>Paris</arg_value></tool_call>", [PARIS]),
    (
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris</arg_value>days</arg_key><arg_value>3</arg_value>"
        "metric</arg_key>\n<arg_value>true</arg_value></tool_call>",
        [FORECAST],
    ),
]
SEED_OSS: Cases = [
    (
        "Let me look.\n<seed:tool_call>\n<function=get_weather>\n<parameter=city>Paris</parameter>\n"
        "<parameter=days>3</parameter>\n<parameter=metric>True</parameter>\n</function>\n</seed:tool_call>\n"
        "<seed:tool_call>\n<function=ping>\n</function>\n</seed:tool_call>",
        [LOOK, FORECAST, PING],
    ),
    (
        "<seed:tool_call><function=write_file><parameter=content>a\nb\n</parameter></function></seed:tool_call>",
        [("call", "write_file", '{"content": "a\\nb\\n"}')],
    ),
    ("<function=ping>\n</function>\n</seed:tool_call>", [PING]),
    ("<seed:tool_call>no call</seed:tool_call>", [("text", "<seed:tool_call>no call</seed:tool_call>")]),
]
MINIMAX_M2: Cases = [
    (
        "<think>\nHm.\n</think>\n\nLet me look.\n<minimax:tool_call>\n"
        '<invoke name="get_weather">\n<parameter name="city">Paris</parameter>\n<parameter name="days">3</parameter>\n'
        '<parameter name="metric">true</parameter>\n</invoke>\n<invoke name="ping">\n</invoke>\n</minimax:tool_call>',
        [("thought", "Hm."), LOOK, FORECAST, PING],
    ),
    (
        '<minimax:tool_call><invoke name="write_file"><parameter name="content"><p>x</p>\n</parameter></invoke>',
        [("call", "write_file", '{"content": "<p>x</p>\\n"}')],
    ),
    (
        '<minimax:tool_call><invoke name="get_weather"><parameter name="city" type="string">Paris</parameter></invoke>',
        [PARIS],
    ),
    ('<minimax:tool_call>\n<invoke name="rm">', [("text", '<minimax:tool_call>\n<invoke name="rm">')]),
]
LIST = '[{"name": "get_weather", "arguments": {"city": "Paris"}}, {"name": "ping", "arguments": {}}]'
COMMAND_R: Cases = [
    (
        'Plan: I look.\nAction: ```json\n[\n    {\n        "tool_name": "get_weather",\n        "parameters": {\n'
        '            "city": "Paris"\n        }\n    },\n    {\n        "tool_name": "ping",\n'
        '        "parameters": {}\n    }\n]\n```',
        [
            ("text", "Plan: I look.\n"),
            ("call", "get_weather", '{\n            "city": "Paris"\n        }'),
            PING,
        ],
    ),
    ('Action:\n```json\n[\n{"tool_name": "ping", "parameters": {}}\n]```\n', [PING]),
    ('Action: [{"tool_name": "ping", "parameters": {}}]', [PING]),
    ("Action: none. [1]", [("text", "Action: none. [1]")]),
    (
        'Action: ```json\n[{"tool_name": "directly-answer", "parameters": {}}]\n```',
        [("text", 'Action: ```json\n[{"tool_name": "directly-answer", "parameters": {}}]\n```')],
    ),
]
COHERE: Cases = [
    (
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "get_weather", "parameters": {"city": "Paris"}},\n'
        '    {"tool_call_id": "1", "tool_name": "ping", "parameters": {}}\n]<|END_ACTION|>',
        [PARIS, PING],
    ),
    (f"Let me look.\n<|START_ACTION|>{LIST}<|END_ACTION|>", [LOOK, PARIS, PING]),
    ('<|START_ACTION|>{"tool_name": "ping"}', [PING]),
    ("<|START_ACTION|>none<|END_ACTION|>", [("text", "<|START_ACTION|>none<|END_ACTION|>")]),
]
GRANITE: Cases = [
    (f"<|tool_call|>{LIST}", [PARIS, PING]),
    (f"Let me look.\n<|tool_call|> {LIST}", [LOOK, PARIS, PING]),
    ("<|tool_call|>[{'name': 'get_weather', 'arguments': {'city': 'Paris'}}", [PARIS]),
    ("<|tool_call|>none", [("text", "<|tool_call|>none")]),
]
PHI4_MINI: Cases = [
    (f"<|tool_call|>{LIST}<|/tool_call|>", [PARIS, PING]),
    (f"functools{LIST}", [PARIS, PING]),
    ("functools.reduce and functools[0]", [("text", "functools.reduce and functools[0]")]),
]
_CITY = '<atem:parameter name="city">Paris</atem:parameter>\n'
_ATEM = f'<atem:function_calls>\n<atem:invoke name="get_weather">\n{_CITY}</atem:invoke>\n</atem:function_calls>'
_NO_ARGUMENTS = '<atem:function_calls>\n<atem:invoke name="ping">\n</atem:invoke>\n</atem:function_calls>'
MUSE_GLIMMER: Cases = [
    (
        " to=self<|message|>User asks.<|eom|><|start|>assistant to=user<|message|>Hello.<|eot|>",
        [("thought", "User asks."), ("text", "Hello.")],
    ),
    (
        " to=self<|message|>Hm.<|eom|><|start|>assistant to=user<|message|>Let me look.\n<|eom|>"
        f"<|start|>assistant to=get_weather<|message|>{_ATEM}<|eom|>"
        f"<|start|>assistant to=ping<|message|>{_NO_ARGUMENTS}<|eot|>",
        [("thought", "Hm."), LOOK, PARIS, PING],
    ),
    ("<|message|>Hello.", [("text", "Hello.")]),
    ("Hello.", [("text", "Hello.")]),
    (f" to=user<|message|>In short: {_ATEM}<|eot|>", [("text", f"In short: {_ATEM}")]),
    (f" to=self<|message|>I could write {_ATEM}<|eom|>", [("thought", f"I could write {_ATEM}")]),
    (f" to=get_weather<|message|>{_ATEM.removesuffix('</atem:function_calls>')}", [PARIS]),
    (
        ' to=write_file<|message|><atem:function_calls><atem:invoke name="write_file">'
        '<atem:parameter name="content"><p>x</p>\n</atem:parameter></atem:invoke></atem:function_calls>',
        [("call", "write_file", '{"content": "<p>x</p>\\n"}')],
    ),
    (" to=ping<|message|>So be it.<|eot|>", [("text", "So be it.")]),
    (" to=self<|message|>cut sho", [("thought", "cut sho")]),
    (" to=user", [("text", " to=user")]),
]
NEMOTRON: Cases = [
    (f"<think>\nHm.\n</think>\n\n<TOOLCALL>{LIST}</TOOLCALL>", [("thought", "Hm."), PARIS, PING]),
    ('<TOOLCALL>[{"name": "ping", "arguments": "{}"}]</TOOLCALL>!', [PING, ("text", "!")]),
    ("<TOOLCALL></TOOLCALL>", []),
]
HUNYUAN: Cases = [
    (f"Let me look.\n<tool_calls>{LIST}</tool_calls>", [LOOK, PARIS, PING]),
    ('<tool_calls>\n{"name": "ping", "arguments": {}}\n</tool_calls>', [PING]),
]
KIMI_HEAD = "<|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
KIMI_K2: Cases = [
    (
        f'Let me look.\n<|tool_calls_section_begin|>{KIMI_HEAD}{{"city": "Paris"}}<|tool_call_end|>'
        "<|tool_call_begin|>functions.ping:1<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
        [LOOK, PARIS, PING],
    ),
    (f'{KIMI_HEAD}{{"city": "Paris"}}<|tool_call_end|>', [PARIS]),
    ("<|tool_call_begin|>ping<|tool_call_argument_begin|>{}", [PING]),
    ("<|tool_call_begin|>functions.ping:0<|tool_call_argument_begin|><|tool_call_end|>", [PING]),
    (
        f'<|tool_call_section_begin|>{KIMI_HEAD}{{"city": "Paris"}}<|tool_call_end|><|tool_call_section_end|>',
        [PARIS],
    ),
    ("<|tool_calls_section_begin|>?", [("text", "<|tool_calls_section_begin|>?")]),
]
LFM2: Cases = [
    (
        '<|tool_call_start|>[get_weather(city="Paris", days=3, metric=True), ping()]<|tool_call_end|>Let me look.\n',
        [FORECAST, PING, LOOK],
    ),
    ("[get_weather(city='Paris')]", [PARIS]),
    (f"<|tool_call_start|>{LIST}<|tool_call_end|>", [PARIS, PING]),
    ("<|tool_call_start|>get_weather(city='Paris')<|tool_call_end|>", [PARIS]),
    ("<|tool_call_start|>[weather.get_weather(city='Paris')]<|tool_call_end|>", [PARIS]),
    ('<|tool_call_start|>[get_weather(city="Par', [("call", "get_weather", '{"city": "Par')]),
    ("<|tool_call_start|>x<|tool_call_end|>", [("text", "<|tool_call_start|>x<|tool_call_end|>")]),
]
OLMO3: Cases = [
    (
        'Let me look.\n<function_calls>\nget_weather(city="Paris", days=3, metric=true)\nping()\n</function_calls>',
        [LOOK, FORECAST, PING],
    ),
    ("<function_calls>get_weather(city='Paris')</function_calls>", [PARIS]),
    ("<function_calls>ping()", [PING]),
    ("<function_calls>one</function_calls>", [("text", "<function_calls>one</function_calls>")]),
]
GEMMA4: Cases = [
    (
        'Let me look.\n<|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:3,metric:true}<tool_call|>'
        "<|tool_call>call:ping{}<tool_call|>",
        [LOOK, FORECAST, PING],
    ),
    (
        '<|tool_call>call:write_file{content:<|"|>say "a", {b}\\n\n<|"|>,lines:[1,<|"|>"x",<|"|>,{a:null,b:[]}]}'
        "<tool_call|>",
        [
            (
                "call",
                "write_file",
                '{"content": "say \\"a\\", {b}\\\\n\\n", "lines": [1,"\\"x\\",",{"a":null,"b":[]}]}',
            )
        ],
    ),
    ('<|tool_call>call:get_weather{"city": "Paris"}<tool_call|>', [PARIS]),
    ('<|tool_call>call:get_weather{city:<|"|>Par', [("call", "get_weather", '{"city": "Par')]),
    ("<|tool_call>call:get_weather{city}<tool_call|>!", [("text", "<|tool_call>call:get_weather{city}<tool_call|>!")]),
    ("<|tool_call>ping<tool_call|>", [("text", "<|tool_call>ping<tool_call|>")]),
    ("<|tool_call>call:ping<tool_call|>", [PING]),
    ("<|tool_call>call:ping{}call:ping{}<tool_call|>", [PING, PING]),
    ('<|tool_call>call:default_api:get_weather{city:<|"|>Paris<|"|>}<tool_call|>', [PARIS]),
    # strings without the first quotation mark, with other quotation marks and without any
    ('<|tool_call>call:get_weather{city:Paris<|"|>,days:3,metric:true}<tool_call|>', [FORECAST]),
    (
        '<|tool_call>call:get_weather{days:3,city:Paris, France: the city<|"|>}<tool_call|>',
        [("call", "get_weather", '{"days": 3, "city": "Paris, France: the city"}')],
    ),
    (
        "<|tool_call>call:get_weather{city:'Paris, it's',days:3}<tool_call|>",
        [("call", "get_weather", '{"city": "Paris, it\'s", "days": 3}')],
    ),
    (
        "<|tool_call>call:write_file{lines:['a,]', {'b': 'c'}],path:x, y}<tool_call|>",
        [("call", "write_file", '{"lines": ["a,]", {"b": "c"}], "path": "x, y"}')],
    ),
    ('<|tool_call>call:get_weather{city=<|"|>Paris<|"|>,days=3,metric=True}<tool_call|>', [FORECAST]),
    ("<|tool_call>call:get_weather{city:7,days:3}<tool_call|>", [("call", "get_weather", '{"city": "7", "days": 3}')]),
    (
        "<|tool_call>call:get_weather{days:3, other:it,zone:5}<tool_call|>",
        [("call", "get_weather", '{"days": 3, "other": "it", "zone": 5}')],
    ),
]

FAMILIES: dict[str, Cases] = {
    "cohere": COHERE,
    "command_r": COMMAND_R,
    "gemma4": GEMMA4,
    "glm": GLM,
    "granite": GRANITE,
    "hunyuan": HUNYUAN,
    "kimi_k2": KIMI_K2,
    "lfm2": LFM2,
    "minimax_m2": MINIMAX_M2,
    "muse_glimmer": MUSE_GLIMMER,
    "nemotron": NEMOTRON,
    "olmo3": OLMO3,
    "phi4_mini": PHI4_MINI,
    "seed_oss": SEED_OSS,
}
