"""Model output in each tool-call format, and the expected events."""

from neuron.parsers.family_examples import FAMILIES
from neuron.parsers.piecewise_parsing import JoinedEvent

PARIS = ("call", "get_weather", '{"city": "Paris"}')
PING = ("call", "ping", "{}")
RM = ("call", "rm", "{}")  # a tool that is not offered
BANG = ("text", "!")

HERMES: list[tuple[str, list[JoinedEvent]]] = [
    ('<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>', [PARIS]),
    (
        'Let me look.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>\nDone.',
        [("text", "Let me look.\n"), PARIS, PING, ("text", "\nDone.")],
    ),
    (
        "<think>\nHm, <tool_call>?\n</think>\n\n"
        '<tool_call>{"name": "write_file", "arguments": {"content": "<think>\\n</tool_call>"}}</tool_call>',
        [("thought", "Hm, <tool_call>?"), ("call", "write_file", '{"content": "<think>\\n</tool_call>"}')],
    ),
    ('<tool_call>{"arguments": {"city": "Paris"}, "name": "get_weather"}</tool_call>', [PARIS]),
    ('<tool_call>{"name": "ping"}</tool_call>', [PING]),
    ('<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}}}}</tool_call>!', [PARIS, ("text", "!")]),
    (
        '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}}}}}</tool_call>',
        [PARIS],
    ),
    ('<tool_call>{"arguments": {"name": "get_weather", "city": "Paris"}}</tool_call>', [PARIS]),
    ('<tool_call>{"name": "get_weather", "arguments": "{\\"city\\": \\"Paris\\"}"}</tool_call>', [PARIS]),
    ('<tool_call>{"name": "ping", "arguments": null}', [PING]),
    ('<tool_call>{"get_weather": {"city": "Paris"}}</tool_call>!', [PARIS, BANG]),
    ('<tool_call>{"get_weather": "Paris"}</tool_call>', [("text", '<tool_call>{"get_weather": "Paris"}</tool_call>')]),
    (
        'I look.\n<function_calls>\n<invoke name="get_weather">\n<parameter name="city">Paris</parameter>\n</invoke>\n'
        '<invoke name="ping">\n</invoke>\n</function_calls>',
        [("text", "I look.\n"), PARIS, PING],
    ),
    ('<invoke name="ping">\n</invoke>', [PING]),
    ('Write `<invoke name="rm">`.', [("text", 'Write `<invoke name="rm">`.')]),
    ('<tool_call>{"name": "rm", "arguments": {}}</tool_call>', [RM]),
    (
        '<tool_call>{"arguments": {"name": "rm", "a": 1}}</tool_call>',
        [("text", '<tool_call>{"arguments": {"name": "rm", "a": 1}}</tool_call>')],
    ),
    (
        '<tool_call>{"arguments": {"name": "ping", "a": 1e999}}</tool_call>',
        [("text", '<tool_call>{"arguments": {"name": "ping", "a": 1e999}}</tool_call>')],
    ),
    (
        '<tool_call>{"name": "ping", "arguments": "{\\"a\\": 1e999}"}</tool_call>',
        [("text", '<tool_call>{"name": "ping", "arguments": "{\\"a\\": 1e999}"}</tool_call>')],
    ),
    (
        '<tool_call>{"name": "write_file", "arguments": {\n"content": "a\n\tb\r\\n"}}</tool_call>',
        [("call", "write_file", '{\n"content": "a\\n\\tb\\r\\n"}')],
    ),
    (
        '<tool_call>{"name": "ping", "id": "1", "arguments": {}, "why": [{"x": 1}], "so": "y"}</tool_call>!',
        [PING, BANG],
    ),
    ('<tool_call>{"arguments": {}, "why": "x", "name": "ping"}</tool_call>!', [PING, BANG]),
    (
        '<tool_call>{"name": "ping", "city": "Paris"}</tool_call>',
        [("text", '<tool_call>{"name": "ping", "city": "Paris"}</tool_call>')],
    ),
    ('<tool_call>{"name": "get_weather", "city": "Paris"}</tool_call>!', [PARIS, BANG]),
    (
        '<tool_call>{"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Paris"}}}\n',
        [PARIS],
    ),
    ('<tool_call>[{"function": {"name": "ping"}}, {"tool": "ping"}]</tool_call>!', [PING, PING, BANG]),
    ('<tool_call>{"function": "get_weather", "arguments": {"city": "Paris"}}</tool_call>', [PARIS]),
    (
        '<tool_call>{"function": "fly", "arguments": {}}</tool_call>',
        [("text", '<tool_call>{"function": "fly", "arguments": {}}</tool_call>')],
    ),
    (
        '<tool_call>\n{"name": "get_weather", "city": "Paris", "days": "3", "metric": True}\n</tool_call>',
        [("call", "get_weather", '{"city": "Paris", "days": 3, "metric": true}')],
    ),
    (
        '<tool_call>{"name": "get_weather", "city": "Paris", "country": "F"}</tool_call>',
        [("text", '<tool_call>{"name": "get_weather", "city": "Paris", "country": "F"}</tool_call>')],
    ),
    ('<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}</tool_call>!', [PARIS, BANG]),
    ("<tool_call>garbage</tool_call>", [("text", "<tool_call>garbage</tool_call>")]),
    ("<tool_call></tool_call>", []),
    ("Look.<tool_call>\n</tool_call>\nSo.", [("text", "Look.\nSo.")]),
    (
        '<tool_call>{"name": "ping", "arguments": {"a": x}}</tool_call>\n<tool_call>{"name": "ping"}</tool_call>',
        [("call", "ping", '{"a": "x"}'), PING],
    ),
    ('<tool_call>{"path": "a"}</tool_call>', [("text", '<tool_call>{"path": "a"}</tool_call>')]),
    ('<tool_call><tool_call>{"name": "ping"}</tool_call>', [PING]),
    ('<tool_call>\n{"name": "ping", "argu', [("text", '<tool_call>\n{"name": "ping", "argu')]),
    ('<tool_call>{"name": "ping", "arguments": {"a": tru', [("call", "ping", '{"a": ')]),
    ('<tool_call>{"name": "ping", "arguments": {"a": +1}}', [("call", "ping", '{"a": 1}')]),
    ("\n <tool_call>garbage", [("text", "\n <tool_call>garbage")]),
    ('<tool_call>{"name": "ping"}</tool_call>\n<tool_call>x', [PING, ("text", "\n<tool_call>x")]),
    ("a < b, <tool", [("text", "a < b, <tool")]),
    ("  \n", [("text", "  \n")]),
    ("<tool_call>\n<function=ping>\n</function>\n</tool_call>", [PING]),
]

BOTH = '{"name": "get_weather", "arguments": {"city": "Paris"}}', '{"name": "ping", "arguments": {}}'
UNTAGGED: list[tuple[str, list[JoinedEvent]]] = [
    (BOTH[0], [PARIS]),
    (f"\n {BOTH[0]}\n", [PARIS]),
    (f"```json\n{BOTH[0]}\n```", [PARIS]),
    (f"```\n{BOTH[0]}\n```\n", [PARIS]),
    (f"```json\n{BOTH[0]}", [PARIS]),
    (
        f"I look.\n\n```json\n{BOTH[0]}\n```\nThen I say it.",
        [("text", "I look.\n\n"), PARIS, ("text", "\nThen I say it.")],
    ),
    (f"I look:\n{BOTH[0]} Done.", [("text", "I look:\n"), PARIS, ("text", " Done.")]),
    (f"{BOTH[0]}\n{BOTH[1]}", [PARIS, PING]),
    (f"```json\n{BOTH[0]}\n{BOTH[1]}\n```", [PARIS, PING]),
    (f"```json\n{BOTH[0]}\n```\n\n```json\n{BOTH[1]}\n```", [PARIS, PING]),
    (f"[{BOTH[0]}, {BOTH[1]}]", [PARIS, PING]),
    (f"```json\n[\n  {BOTH[0]},\n  {BOTH[1]}\n]\n```\n", [PARIS, PING]),
    (f"[{BOTH[0]}] \n.", [PARIS, ("text", " \n.")]),
    (f"{BOTH[0]}\nand\n{BOTH[1]}", [PARIS, ("text", "\nand\n"), PING]),
    (f"{BOTH[0]}\n<tool_call>\n{BOTH[1]}\n</tool_call>", [PARIS, PING]),
    (f"<tool_call>{BOTH[1]}</tool_call>\n{BOTH[0]}", [PING, ("text", f"\n{BOTH[0]}")]),
    (f"<think>I call.</think>\n{BOTH[0]}", [("thought", "I call."), PARIS]),
    ('{"arguments": {"city": "Paris"}, "name": "get_weather"}', [PARIS]),
    ('{"id": 1, "type": "function", "name": "get_weather", "arguments": {"city": "Paris"}, "why": "so"}', [PARIS]),
    ('{"name": "get_weather", "arguments": "{\\"city\\": \\"Paris\\"}"}', [PARIS]),
    ('{"name": "get_weather", "arguments": {"city": "Paris"}}}}', [PARIS]),
    ('{"name": "get_weather", "arguments": {"city": "Paris"}', [PARIS]),
    ('{"name": "ping", "arguments": {"a": tru', [("call", "ping", '{"a": ')]),
]
UNTAGGED += [
    (text, [("text", text)])
    for text in (
        "{",
        "{}",
        "[",
        "[1, 2]",
        "```",
        "```json\n",
        "```python\nprint({})\n```\n{1}",
        "{x}\n{ y }\n[z]",
        '{"name": "Bob", "age": 3}',
        '{"name": "rm", "arguments": {}}',
        '{"name": "ping"}',
        '{"name": "ping", "description": "", "parameters": {"type": "object"}}',
        '{"name": "ping", "parameters": {}}',
        '{"arguments": {"name": "ping", "a": 1}}',
        '{"arguments": {}, "why": "x", "name": "ping"}',
        '{"name": "pingping", "arguments": {}}',
        '```json\n{"name": "Bob", "arguments": {}}\n```\nThat is Bob.',
        '[{"name": "Bob", "arguments": {}}]',
        'A call is {"name": "ping", "arguments": {}}.',
        '  {"name": "ping", "argu',
        "```jsonc\n{}",
    )
]
HERMES += UNTAGGED

QWEN_XML: list[tuple[str, list[JoinedEvent]]] = [
    (
        "I look.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n"
        "</parameter>\n<parameter=metric>\ntrue\n</parameter>\n</function>\n</tool_call>",
        [("text", "I look.\n"), ("call", "get_weather", '{"city": "Paris", "days": 3, "metric": true}')],
    ),
    (
        "<function=get_weather><parameter=city>7</parameter><parameter=days>many</parameter>"
        "<parameter=metric>False</parameter><parameter=other>[1, 2]</parameter></function></tool_call>",
        [("call", "get_weather", '{"city": "7", "days": "many", "metric": false, "other": [1, 2]}')],
    ),
    (
        "<tool_call><function=write_file><parameter=content>\n\nif a < b:\n    '<tag>'\n\n</parameter>\n"
        "<parameter=path>a\n</function></tool_call>",
        [("call", "write_file", '{"content": "\\nif a < b:\\n    \'<tag>\'\\n", "path": "a"}')],
    ),
    (
        "<tool_call>\n<function=ping>\n</function>\n</tool_call>\n<tool_call><function=ping></function></tool_call>",
        [PING, PING],
    ),
    ("<function=rm>\n</function>", [("text", "<function=rm>\n</function>")]),
    ("<tool_call><function=rm></function></tool_call>", [RM]),
    ("<tool_call><function=ping>1", [("text", "<tool_call><function=ping>1")]),
    ("<tool_call><function=ping><parameter=a>1", [("call", "ping", '{"a": ')]),
    (
        "<tool_call><function=ping><parameter=a>1</parameter><parameter=b>2",
        [("call", "ping", '{"a": 1, "b": ')],
    ),
    (
        "<tool_call><function=write_file><parameter=path>\na\n</param\n",
        [("call", "write_file", '{"path": "a\\n</param')],
    ),
    (
        "<tool_call><function=ping><parameter=$filter>1</parameter><parameter=@type>é x</parameter>\n</tool_call>!",
        [("call", "ping", '{"$filter": 1, "@type": "é x"}'), BANG],
    ),
    (
        f"<tool_call><function=ping><parameter={'x' * 129}>1</parameter></function></tool_call>",
        [("text", f"<tool_call><function=ping><parameter={'x' * 129}>1</parameter></function></tool_call>")],
    ),
    (
        "<function=ping><parameter=a\n>1</parameter></function>",
        [("text", "<function=ping><parameter=a\n>1</parameter></function>")],
    ),
    ("<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</tool_call>!", [PARIS, BANG]),
    ("<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n", [PARIS]),
    ('<function=ping><parameter=a>{"x": {}}<parameter=a>', [("call", "ping", '{"a": {"x": {}}, "a": ')]),
    ('<tool_call>{"name": "ping", "arguments": {}}</tool_call>', [PING]),
    ('<tool_call>\n<function=get_weather>\n{"city": "Paris"}\n</function>\n</tool_call>', [PARIS]),
    ('<tool_call>\n<function>get_weather</function>\n{"city": "Paris"}\n</tool_call>', [PARIS]),
    ("<tool_call>\n<function=get_weather>\n<parameter=city\nParis\n</parameter>\n</function>\n</tool_call>", [PARIS]),
    (
        '<tool_call>\n<function="get_weather">\n<parameter="city">\nParis\n</parameter>\n</function>\n</tool_call>',
        [PARIS],
    ),
    ("<function='get_weather'><parameter='city'>Paris</parameter></function>", [PARIS]),
    (
        "<function=write_file>\n<parameter=content>\nx</content>y\n</content>\n<parameter=path>\na\n</path>\n</function>",
        [("call", "write_file", '{"content": "x</content>y", "path": "a"}')],
    ),
    (
        "<function=write_file>\n<parameter=content>\n<content>\nx\n</content>\n<parameter=path>\na\n</parameter>",
        [("call", "write_file", '{"content": "<content>\\nx\\n</content>", "path": "a"}')],
    ),
    (
        "<function=write_file>\n<parameter=content>\nx\n</content>\n</parameter>\n</function>",
        [("call", "write_file", '{"content": "x\\n</content>"}')],
    ),
    ('<function="ping></function>', [PING]),
    ('<function="rm rf"></function>', [("text", '<function="rm rf"></function>')]),
    (
        "<tool_call>\n<function=get_weather>\n<parameter=city: Paris\n</parameter>\n</function>\n</tool_call>",
        [
            (
                "text",
                "<tool_call>\n<function=get_weather>\n<parameter=city: Paris\n</parameter>\n</function>\n</tool_call>",
            )
        ],
    ),
]

LLAMA: list[tuple[str, list[JoinedEvent]]] = [
    ('{"name": "get_weather", "parameters": {"city": "Paris"}}', [PARIS]),
    ('\n\n{"type": "function", "name": "get_weather", "parameters": {"city": "Paris"}}', [PARIS]),
    (
        '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris"}}; {"name": "ping", "parameters": {}}',
        [PARIS, PING],
    ),
    ('{"name": "ping", "parameters": {}} and more', [PING, ("text", " and more")]),
    ('{"name": "ping", "parameters": {}}; and more', [PING, ("text", "; and more")]),
    ('{"name": "Bob", "age": 3}', [("text", '{"name": "Bob", "age": 3}')]),
    ('{"name": "ping", "age": 3}', [("text", '{"name": "ping", "age": 3}')]),
    ('{"name": "rm", "parameters": {}}', [("text", '{"name": "rm", "parameters": {}}')]),
    ('<|python_tag|>{"name": "rm", "parameters": {}}', [RM]),
    (
        '{"name": "ping", "parameters": {}}}}; {"name": "get_weather", "parameters": {"city": "Paris"}}}',
        [PING, PARIS],
    ),
    ('{"name": "ping", "parameters": {}}}; no', [PING, ("text", "}; no")]),
    ('{"age": 3', [("text", '{"age": 3')]),
    ('In JSON: {"name": "ping", "parameters": {}}', [("text", 'In JSON: {"name": "ping", "parameters": {}}')]),
    ('Look: <|python_tag|>get_weather.call(city="Paris")', [("text", "Look: "), PARIS]),
    ("<|python_tag|>import os", [("text", "<|python_tag|>import os")]),
    ('<think>x</think>{"name": "ping", "parameters": {}}', [("thought", "x"), PING]),
    ('```json\n{"name": "get_weather", "parameters": {"city": "Paris"}}\n```', [PARIS]),
    ('```\n{"name": "ping", "parameters": {}}\n```\nThat is all.', [PING, ("text", "\nThat is all.")]),
    ('```json\n{"name": "Bob", "age": 3}\n```', [("text", '```json\n{"name": "Bob", "age": 3}\n```')]),
    ("```python\nprint({})\n```", [("text", "```python\nprint({})\n```")]),
]

PYTHONIC: list[tuple[str, list[JoinedEvent]]] = [
    ('[get_weather(city="Paris")]', [PARIS]),
    (
        "[get_weather(city='Par,)is', days=3, metric=True), ping( )]",
        [("call", "get_weather", '{"city": "Par,)is", "days": 3, "metric": true}'), PING],
    ),
    ("<|python_start|>[ping()]<|python_end|>", [PING]),
    (
        "[write_file(path='it\\'s', lines=[1, {'a': (None, -2.5)}], content=null)]",
        [("call", "write_file", '{"path": "it\'s", "lines": [1, {"a": [null, -2.5]}], "content": null}')],
    ),
    ("[ping(), rm()]", [PING, ("text", ", rm()]")]),
    ("[1, 2, 3]", [("text", "[1, 2, 3]")]),
    ("[link](http://x)", [("text", "[link](http://x)")]),
    ("[rm()]", [("text", "[rm()]")]),
    ("<|python_start|>[rm()]<|python_end|>", [RM]),
    ("[ping(a=open('x'))]", [("call", "ping", '{"a": "open(\'x\')"}')]),
    ("[ping(a='x' + 'y')]", [("call", "ping", '{"a": "xy"}')]),
    ("[ping(a='x' + y)]", [("call", "ping", '{"a": "x\' + y)]')]),
    ("[ping(a='x, ", [("call", "ping", '{"a": "x, ')]),
    (
        "[ping(a='''x\n'y''', b='' \"z\"\n'', c=\"\\x41\\u00e9\\U0001f600\\033[0m\\d\\xg\\/\\\n.\")]",
        [("call", "ping", '{"a": "x\\n\'y", "b": "z", "c": "Aé😀\\u001b[0m\\\\d\\\\xg/."}')],
    ),
    ('[ping(a="\\ud83d\\ude00")]', [("call", "ping", '{"a": "\\ud83d\\ude00"}')]),
    ("[ping(a={'b': 1e999})]", [("call", "ping", '{"a": ')]),
    (
        "[get_weather(city=02139, days=007), ping(day=2024-01-05, at=10:30, code=007, ip=10.0.0.1, path=/tmp/x)]",
        [
            ("call", "get_weather", '{"city": "02139", "days": 7}'),
            (
                "call",
                "ping",
                '{"day": "2024-01-05", "at": "10:30", "code": "007", "ip": "10.0.0.1", "path": "/tmp/x"}',
            ),
        ],
    ),
    ("[ping(a=[True, null, {'b': false,}])]", [("call", "ping", '{"a": [true, null, {"b": false}]}')]),
    ("[ping(1)]", [("text", "[ping(1)]")]),
]

MISTRAL: list[tuple[str, list[JoinedEvent]]] = [
    ('[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}, "id": "VvvODy9mT"}]', [PARIS]),
    (
        'Look. [TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris"}}, {"name": "ping"}] x',
        [("text", "Look. "), PARIS, PING, ("text", " x")],
    ),
    ('[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}[TOOL_CALLS]ping[ARGS]{}', [PARIS, PING]),
    ('[TOOL_CALLS]get_weather[CALL_ID]123456789[ARGS]{"city": "Paris"}', [PARIS]),
    ('[TOOL_CALLS]get_weather{"city": "Paris"}', [PARIS]),
    ('[TOOL_CALLS][{"name": "ping"}, {"name": "rm"}]', [PING, RM]),
    ('[TOOL_CALLS][{"name": "ping"}, {"age": 1}]', [PING, ("text", ', {"age": 1}]')]),
    (
        '[TOOL_CALLS][{"name": "ping"}}, {"name": "get_weather", "arguments": {"city": "Paris"}}}}]!',
        [PING, PARIS, BANG],
    ),
    ('[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}]', [PARIS]),
    ("[TOOL_CALLS]rm[ARGS]{}", [RM]),
    ("[TOOL_CALLS]rm[ARGS]{}} [TOOL_CALLS]ping[ARGS]{}}}}", [RM, PING]),
    ("[TOOL_CALLS]ping[ARGS]{}} so", [PING, ("text", "} so")]),
    ("[TOOL_CALLS]ping[ARGS]nothing", [("text", "[TOOL_CALLS]ping[ARGS]nothing")]),
    ("[TOOL_", [("text", "[TOOL_")]),
]

_V3 = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"
DEEPSEEK: list[tuple[str, list[JoinedEvent]]] = [
    (
        "<think>x</think>Look.<｜tool▁calls▁begin｜>"
        + _V3.format("get_weather", '{"city": "Paris"}')
        + "\n"
        + _V3.format("ping", "{}")
        + "<｜tool▁calls▁end｜>",
        [("thought", "x"), ("text", "Look."), PARIS, PING],
    ),
    (
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Paris"}<｜tool▁call▁end｜>'
        "<｜tool▁call▁begin｜>ping<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        [PARIS, PING],
    ),
    ("<｜tool▁call▁begin｜>ping<｜tool▁sep｜>{}<｜tool▁call▁end｜>", [PING]),
    ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>rm<｜tool▁sep｜>{}", [RM]),
    ("<｜tool▁call▁begin｜>function<｜tool▁sep｜>ping\n{}}\n<｜tool▁call▁end｜>!", [PING, BANG]),
    ("<｜tool▁call▁begin｜>ping<｜tool▁sep｜>\n{}}}}\n<｜tool▁call▁end｜>!", [PING, BANG]),
    ("<｜tool▁call▁begin｜>ping<｜tool▁sep｜>```json\n{}\n```<｜tool▁call▁end｜>!", [PING, BANG]),
    ("<｜tool▁call▁begin｜>function<｜tool▁sep｜>ping\n```json\n{}\n```", [PING]),
    ("<｜tool▁call▁begin｜>ping<｜tool▁sep｜><｜tool▁call▁end｜>", [PING]),
    ("<｜tool▁call▁begin｜>function<｜tool▁sep｜>ping\n<｜tool▁call▁end｜>!", [PING, BANG]),
    ("<｜tool▁calls▁begin｜>x", [("text", "<｜tool▁calls▁begin｜>x")]),
]

HARMONY: list[tuple[str, list[JoinedEvent]]] = [
    (
        "<|channel|>analysis<|message|>User asks.<|end|><|start|>assistant<|channel|>final<|message|>Hello.",
        [("thought", "User asks."), ("text", "Hello.")],
    ),
    (
        "<|channel|>analysis<|message|>Need it.<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather "
        '<|constrain|>json<|message|>{"city": "Paris"}<|call|>',
        [("thought", "Need it."), PARIS],
    ),
    (' to=functions.get_weather<|channel|>commentary json<|message|>{"city": "Paris"}', [PARIS]),
    (
        "<|channel|>commentary<|message|>I look.<|end|>"
        "<|start|>assistant to=functions.ping<|channel|>commentary<|message|>{}<|call|>"
        "<|start|>assistant<|channel|>commentary to=functions.ping<|message|><|call|>",
        [("text", "I look."), PING, PING],
    ),
    ("<|channel|>commentary to=functions.rm<|message|>{}}}<|call|>", [RM]),
    (" to=functions.ping<|channel|>commentary<|message|>", [PING]),
    ("<|channel|>commentary to=functions.ping<|message|> So be it.<|call|>", [("text", " So be it.")]),
    (
        '<|channel|>commentary to=functions.ping<|message|>{"a": x}<|call|>',
        [("call", "ping", '{"a": "x"}')],
    ),
    ("<|channel|>final<|message|>a<|constrain|>b<|message|>c<|end|>d<|return|>", [("text", "abcd")]),
    ("<|start|>" + "word " * 120, [("text", "word " * 120)]),
    ("<|channel|>analysis<|channel|>final" + "word " * 120, [("text", "analysisfinal" + "word " * 120)]),
    (" to=day", [("text", " to=day")]),
    ("<|channel|>final<|message|>a <|b", [("text", "a <|b")]),
    ("<|channel|>final", []),
    ("<|channel|>final<|end|>x", [("text", "x")]),
    ("no channel", [("text", "no channel")]),
    # without `<|message|>`, with other words in the header, and with two headers
    ("<|channel|>final Hello there.<|return|>", [("text", "Hello there.")]),
    ("<|channel|>final " + "word " * 120 + "<|return|>", [("text", "word " * 120)]),
    (
        "<|channel|>analysis " + "word " * 120 + "<|end|><|start|>assistant<|channel|>final<|message|>Hi",
        [("thought", "word " * 120), ("text", "Hi")],
    ),
    ("<|channel|>commentary 2?<|end|><|start|>assistant<|channel|>final<|message|>Hi", [("text", "Hi")]),
    (
        "<|channel|>commentary?commentary?<|channel|>analysis<|message|>Hm.<|end|>"
        "<|start|>assistant<|channel|>final<|message|>Hi",
        [("thought", "Hm."), ("text", "Hi")],
    ),
    ("<|channel|>commentary to=repo_browser.ping<|message|>{}<|call|>", [PING]),
    ('<|channel|>commentary to=functions.get_weather <|constrain|>json {"city": "Paris"}<|call|>', [PARIS]),
    # arguments that cannot be repaired
    ("<|channel|>commentary to=functions.ping code {x: [}<|call|>", [("text", "{x: [}")]),
    ('<|channel|>commentary to=functions.ping {"a": 1<|call|>!', [("text", '{"a": 1!')]),
    ('<|channel|>commentary to=functions.ping {"a": "b', [("text", '{"a": "b')]),
    ("<|channel|>final Set to=a {b} here.<|return|>", [("text", "Set to=a {b} here.")]),
    ("<|channel|>analysis<|message|>cut sho", [("thought", "cut sho")]),
]

NONE: list[tuple[str, list[JoinedEvent]]] = [
    ("<think>\n\n</think>\n\nHi.", [("text", "Hi.")]),
    ("<think>\na\n\nb \n</think>\n\nHi. \n", [("thought", "a\n\nb"), ("text", "Hi. \n")]),
    ("Before <think>a</think> after", [("text", "Before <think>a</think> after")]),
    ("<think>a</think>b <think>c</think>", [("thought", "a"), ("text", "b <think>c</think>")]),
    ("<think>a</think>\n</think>\n<think>b</think>c", [("thought", "ab"), ("text", "c")]),
    ("Hm.\n</think>\n\nHi </think>", [("text", "Hm.\nHi </think>")]),
    ("<think>never <think> ends </th", [("thought", "never <think> ends </th")]),
    ("<think>a</think>\n\n", [("thought", "a")]),
    # The model quotes the marker.
    (
        '<think>Write `</think>` and "</think>" here.\n</think>\n\nHi',
        [("thought", 'Write `</think>` and "</think>" here.'), ("text", "Hi")],
    ),
    ("<think>It said 'x'</think>'Hi'", [("thought", "It said 'x'"), ("text", "'Hi'")]),
    ("</think> <tool_call>", [("text", "<tool_call>")]),
    (" <thin", [("text", " <thin")]),
    ("", []),
]

WRITTEN: dict[str | None, list[tuple[str, list[JoinedEvent]]]] = {
    "hermes": HERMES,
    "hermes_strict": [(text, [("text", text)]) for text in (BOTH[0], f"```json\n{BOTH[0]}\n```")],
    "qwen_xml": QWEN_XML,
    "llama3_json": LLAMA,
    "pythonic": PYTHONIC,
    "mistral": MISTRAL,
    "deepseek": DEEPSEEK,
    "harmony": HARMONY,
    **FAMILIES,
    None: NONE,
}
