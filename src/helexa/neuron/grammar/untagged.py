"""Build the grammar of tool calls that models write as plain JSON in the text, without the tags of their format.

The syntax is that of `helexa.neuron.parsers.formats.untagged_calls`. The first call is at the beginning of the output
or of a line. The call may follow the beginning of a list or of a code fence.
"""

import json

from helexa.neuron.grammar.callable_tool import CallableTool
from helexa.neuron.grammar.calls import json_call
from helexa.neuron.grammar.rules import Rules, escaped

MAX_TOOLS = 32
"""Maximum number of tools. Each tool has rules of its own, which take time while the model writes text."""

# From the text before the call to the key after which the call is certain. A lazy rule ends at the first match, so the
# text contains no earlier call.
_LEAD = r"((?s:.*)\n|\s*)(```(json)?\s*)?"
_OBJECT = r"\{\s*(\{\s*)?(\"(id|type)\"\s*:\s*\"[^\"\n]*\"\s*,\s*){0,2}"
_ARGUMENTS = r"\"arguments\"\s*:"


def untagged_calls(rules: Rules, tools: list[CallableTool], limit: int) -> str:
    """Return a Lark expression for text that ends in untagged calls.

    Args:
        rules: the grammar.
        tools: the callable tools.
        limit: maximum number of calls.
    """
    call = rules.add("untagged_call", " | ".join(json_call(rules, tool) for tool in tools))
    listed = _calls(rules, tools, "list", rf"{_LEAD}\[\s*{_OBJECT}")
    single = _calls(rules, tools, "object", f"{_LEAD}{_OBJECT}")
    if limit > 1:
        listed += f' (", " {call}){{0,{limit - 1}}}'
        single += f' ("\\n" {call}){{0,{limit - 1}}}'
    return f'({listed} "\\n"? "]" | {single}) "\\n```"?'


def _calls(rules: Rules, tools: list[CallableTool], kind: str, lead: str) -> str:
    """Return a Lark expression for text that ends in a call, which begins after the regular expression `lead`."""
    firsts: list[str] = []
    reverse: list[str] = []  # calls whose arguments precede the name
    for tool in tools:
        name = json.dumps(tool.name, ensure_ascii=False)
        regex = rf"{lead}\"name\"\s*:\s*{escaped(name)}\s*,\s*{_ARGUMENTS}"
        head = rules.add(f"untagged_{kind}_{tool.index}[lazy]", f"/{regex}/")
        arguments = rules.add(f"untagged_arguments_{tool.index}", f'" "? {tool.arguments(rules)}')
        firsts.append(f"{head} {arguments}")
        reverse.append(f'{arguments} ", \\"name\\": " {json.dumps(name, ensure_ascii=False)}')
    head = rules.add(f"untagged_{kind}_arguments[lazy]", f"/{lead}{_ARGUMENTS}/")
    return f'({" | ".join(firsts)} | {head} ({" | ".join(reverse)})) "\\n"? "}}" "}}"?'
