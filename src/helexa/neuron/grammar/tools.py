"""Builds grammars for output with tool calls, in the model's tool-call format."""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from helexa.core.errors import ApiError
from helexa.neuron.grammar.callable_tool import CallableTool
from helexa.neuron.grammar.calls import bare_xml_call, json_call, python_call, schema_call, xml_call
from helexa.neuron.grammar.reasoning import harmony_final, harmony_message, harmony_text
from helexa.neuron.grammar.rules import Rules, TokenId, literal, without
from helexa.neuron.grammar.untagged import MAX_TOOLS, untagged_calls
from helexa.neuron.parsers.formats.choice import TOOL_CALL_FORMATS
from helexa.neuron.parsers.formats.function_xml import OPEN as FUNCTION
from helexa.neuron.parsers.output import Tools

_NEXT_FUNCTION = "\n" + FUNCTION
MAX_CALLS = 16
"""Maximum number of tool calls in one message; without a limit, small models may call tools forever."""


@dataclass(frozen=True)
class _Calls:
    """Grammar of a list of tool calls.

    Attributes:
        opener: marker at the beginning of the list; "" if the format has none.
        body: grammar of the text after `opener`.
    """

    opener: str
    body: str

    def all(self, rules: Rules) -> str:
        return f"{rules.marker(self.opener)} {self.body}" if self.opener else self.body

    def after(self, rules: Rules, text: str) -> str:
        """Return the grammar of the calls after text, if the list has an opener. `text` is a terminal's name."""
        return f"{rules.text_to('', self.opener, text)} {self.body}" if self.opener else self.body


def for_tools(
    tool_call_format: str,
    tools: Tools,
    choice: str,
    parallel: bool,
    *,
    strict: Collection[str] = (),
    token_id: TokenId = lambda _: None,
    message: str = "",
    reasons: bool = True,
    untagged: bool = False,
) -> str:
    """Return a grammar for output that calls tools, with arguments that match the tools' schemas.

    Args:
        tool_call_format: name of the tool-call format.
        tools: callable tools.
        choice: `required` allows only calls. The name of a tool allows only calls of this tool. `auto` allows text,
            calls, or text and then calls. With `auto`, text that begins like a call must be a call.
        parallel: whether to allow several calls, if the format supports them.
        strict: names of tools whose schemas are fully enforced. For other tools, keywords that llguidance cannot
            enforce are ignored.
        token_id: function that returns the token id of a marker, or None if the marker is not a single token.
        message: grammar of output without calls. With `auto`, the output matches this grammar or consists of calls.
        reasons: whether to allow a reasoning message before the calls. Only used for the Harmony format, which writes
            both reasoning and calls as messages.
        untagged: whether calls in plain JSON without tags are also calls. Only used with `auto` and without `message`.

    Raises:
        ApiError: 400 `invalid_schema`: a tool's schema is invalid. 400 `unsupported_schema`: the tool-call format
            cannot express a tool's schema. 400 `invalid_grammar`: the chosen tool does not exist, `tools` is empty, or
            a tool's name is invalid.
    """
    if choice not in ("required", "auto"):
        if choice not in tools:
            raise ApiError(400, "invalid_grammar", f"there is no tool '{choice[:100]}'", param="tool_choice")
        tools = {choice: tools[choice]}
    if not tools:
        raise ApiError(400, "invalid_grammar", "there are no tools", param="tool_choice")
    callable_tools = [CallableTool(index, name, tools[name], name in strict) for index, name in enumerate(tools)]
    rules = Rules(token_id)
    content = rules.include("message", message) if message and choice == "auto" else ""
    if tool_call_format == "harmony":
        return rules.serialised(_harmony(rules, callable_tools, choice == "auto", content, reasons))
    calls, *others = _FRAMES[tool_call_format](rules, callable_tools, MAX_CALLS if parallel else 1)
    if content:
        return rules.serialised(f"{content} | {calls.all(rules)}")
    if choice != "auto":
        return rules.serialised(calls.all(rules))
    untagged = untagged and len(callable_tools) <= MAX_TOOLS
    known = TOOL_CALL_FORMATS[tool_call_format]
    text = rules.add("TEXT", without(known.openers, known.leading))
    either = [text, *(called.after(rules, text) for called in (calls, *others))]
    if untagged:
        either.append(untagged_calls(rules, callable_tools, MAX_CALLS if parallel else 1))
    return rules.serialised(_either(either))


_Frame = Callable[[Rules, list[CallableTool], int], list[_Calls]]
"""Type of functions that return the grammars of calls. The first grammar is the usual form of the calls."""


def _tagged(call_grammar: Callable[[Rules, CallableTool], str]) -> _Frame:
    def frame(rules: Rules, callable_tools: list[CallableTool], limit: int) -> list[_Calls]:
        call = rules.add("call", _either(call_grammar(rules, tool) for tool in callable_tools))
        body = f'"\\n" {call} "\\n" {rules.marker("</tool_call>")}'
        again = f'"\\n" {rules.marker("<tool_call>")} {body}'
        calls = _several(call, "\n", limit)
        mistaken = f'"\\n" {calls} "\\n</tools>"'
        return [_Calls("<tool_call>", f"{body} {_repeated(again, limit)}"), _Calls("<tools>", mistaken)]

    return frame


def _qwen_xml(rules: Rules, callable_tools: list[CallableTool], limit: int) -> list[_Calls]:
    """Return the grammars of calls between tags, and of calls without the opening tag `<tool_call>`."""
    calls = _tagged(xml_call)(rules, callable_tools, limit)
    bare = [call for tool in callable_tools if (call := bare_xml_call(rules, tool))]
    if bare:
        called = rules.add("bare_call", _either(bare))
        again = f"{literal(_NEXT_FUNCTION)} {called}"
        calls.append(_Calls(FUNCTION, f"{called} {_repeated(again, limit)}"))
    return calls


def _llama(rules: Rules, callable_tools: list[CallableTool], limit: int) -> list[_Calls]:
    call = rules.add("call", _either(schema_call(rules, tool, "parameters") for tool in callable_tools))
    return [_Calls(opener, _several(call, "; ", limit)) for opener in ("", "<|python_tag|>")]


def _pythonic(rules: Rules, callable_tools: list[CallableTool], limit: int) -> list[_Calls]:
    """Return the grammars of calls as a Python list.

    If the vocabulary has tokens that mark the beginning and the end of the list, these tokens are optional at the
    beginning of the output. After text, the markers are required.
    """
    call = rules.add("call", _either(python_call(rules, tool) for tool in callable_tools))
    listed = f'"[" {_several(call, ", ", limit)} "]"'
    start, end = "<|python_start|>", rules.marker("<|python_end|>")
    either = f"({rules.marker(start)} {listed} {end} | {listed})" if rules.is_token(start) else listed
    return [_Calls("", either), _Calls(start, f"{listed} {end}")]


def _mistral(rules: Rules, callable_tools: list[CallableTool], limit: int) -> list[_Calls]:
    """Return the grammar of calls in Mistral's older format, a JSON list.

    If the vocabulary has the token `[ARGS]`, the grammar also allows Mistral's newer format.
    """
    opener, arguments = "[TOOL_CALLS]", "[ARGS]"
    call = rules.add("call", _either(json_call(rules, tool) for tool in callable_tools))
    body = f'" "? "[" {_several(call, ", ", limit)} "]"'
    if rules.is_token(arguments):
        heads = (f"{literal(tool.name)} {rules.marker(arguments)} {tool.arguments(rules)}" for tool in callable_tools)
        named_call = rules.add("named", _either(heads))
        body = f"({body} | {named_call} {_repeated(f'{rules.marker(opener)} {named_call}', limit)})"
    return [_Calls(opener, body)]


def _deepseek(rules: Rules, callable_tools: list[CallableTool], limit: int) -> list[_Calls]:
    """Return the grammars of a list of calls, and of one call without the markers of a list.

    A call has the format of V3 and R1, or the format of V3.1.
    """
    begin, separator, end = (rules.marker(f"<｜tool▁{name}｜>") for name in ("call▁begin", "sep", "call▁end"))
    either: list[str] = []
    for tool in callable_tools:
        arguments = rules.add(f"arguments_{tool.index}", tool.arguments(rules))
        fenced = literal(tool.name + "\n```json\n") + f' {arguments} "\\n```"'
        either += [f'"function" {separator} {fenced}', f"{literal(tool.name)} {separator} {arguments}"]
    one = rules.add("one", f"({_either(either)}) {end}")
    call = rules.add("call", f"{begin} {one}")
    all_end = rules.marker("<｜tool▁calls▁end｜>")
    again = f'"\\n"? {call}'
    listed = _Calls("<｜tool▁calls▁begin｜>", f"{call} {_repeated(again, limit)} {all_end}")
    return [listed, _Calls("<｜tool▁call▁begin｜>", one)]


def _harmony(rules: Rules, callable_tools: list[CallableTool], may_message: bool, content: str, reasons: bool) -> str:
    """Return the grammar of output with tool calls in the Harmony format.

    The output is optional reasoning, followed by one call, which ends the output. If `reasons` is False, reasoning is
    not allowed. If `may_message` is True, text may precede the call, and a final message may replace the call.
    `content` is the Lark expression of the final message's content. If `content` is empty, any text is allowed.
    """
    channel, message, constrain = map(rules.marker, ("<|channel|>", "<|message|>", "<|constrain|>"))
    head = "commentary to=functions."
    calls = _either(
        f'{literal(f"{head}{tool.name} ")} {constrain} "json" {message} {tool.arguments(rules)}'
        for tool in callable_tools
    )
    reasoning = harmony_message(rules, "analysis") if reasons else ""
    if not may_message:
        return f"{reasoning} {channel} ({calls})"
    final = harmony_final(rules, content or harmony_text(rules))
    return f"{reasoning} {harmony_message(rules, 'commentary')} ({channel} ({calls}) | {final})"


_FRAMES: dict[str, _Frame] = {
    "hermes": _tagged(json_call),
    "hermes_strict": _tagged(json_call),
    "qwen_xml": _qwen_xml,
    "llama3_json": _llama,
    "pythonic": _pythonic,
    "mistral": _mistral,
    "deepseek": _deepseek,
}


def _either(bodies: Iterable[str]) -> str:
    return " | ".join(bodies)


def _several(item: str, separator: str, limit: int) -> str:
    return f"{item} {_repeated(f'{literal(separator)} {item}', limit)}"


def _repeated(another: str, limit: int) -> str:
    return f"({another}){{0,{limit - 1}}}" if limit > 1 else ""
