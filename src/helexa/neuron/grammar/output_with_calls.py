"""Builds grammars for output with tool calls, in the model's tool-call format."""

import json
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from helexa.core.errors import ApiError
from helexa.neuron.grammar.gemma import gemma_call
from helexa.neuron.grammar.rules import Rules, TokenId, escaped, literal, without
from helexa.neuron.grammar.single_call import (
    CallableTool,
    bare_tagged_call,
    cohere_call,
    command_r_call,
    json_call,
    python_call,
    schema_call,
    tagged_call,
)
from helexa.neuron.grammar.whole_output import MESSAGES
from helexa.neuron.parsers.formats.gemma4 import CLOSE as GEMMA_CLOSE
from helexa.neuron.parsers.formats.gemma4 import OPEN as GEMMA_OPEN
from helexa.neuron.parsers.formats.harmony_and_muse_glimmer import MuseGlimmer
from helexa.neuron.parsers.formats.llama_json_and_mistral import (
    COHERE,
    COMMAND_R,
    GRANITE,
    HUNYUAN,
    NEMOTRON,
    PHI4_MINI,
    JsonCalls,
)
from helexa.neuron.parsers.formats.pythonic import LFM2, LLAMA_4, OLMO_3, Pythonic
from helexa.neuron.parsers.formats.tagged_calls import FUNCTION_XML, GLM, MINIMAX_M2, SEED_OSS, TaggedCalls
from helexa.neuron.parsers.formats.tool_call_format import TOOL_CALL_FORMATS
from helexa.neuron.parsers.output import Tools

MAX_CALLS = 16  # maximum number of tool calls in one message; small models may call forever

MAX_TOOLS = 32  # maximum number of tools for which untagged calls are matched in text

# Regular expressions that match the text before an untagged call, and the call up to the key that identifies it as a
# call. They are used in lazy rules, which end at the first match, so the text cannot contain an earlier call.
_LEAD = r"((?s:.*)\n|\s*)(```(json)?\s*)?"
_OBJECT = r"\{\s*(\{\s*)?(\"(id|type)\"\s*:\s*\"[^\"\n]*\"\s*,\s*){0,2}"
_ARGUMENTS = r"\"arguments\"\s*:"


@dataclass(frozen=True)
class _Calls:
    """Grammar of a list of tool calls."""

    opener: str  # marker at the beginning of the list; "" if the format has none
    body: str  # grammar of the text after `opener`

    def all(self, rules: Rules) -> str:
        """Return a Lark expression for the list of calls."""
        return f"{rules.marker(self.opener)} {self.body}" if self.opener else self.body

    def after(self, rules: Rules, text: str) -> str:
        """Return a Lark expression: the terminal `text` (only with an opener), the calls."""
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
    """Return a grammar for output with tool calls that match the schemas of `tools`.

    Args:
        tool_call_format: name of the format (see `TOOL_CALL_FORMATS`).
        choice: `required` allows only calls. The name of a tool allows only calls of this tool. `auto` allows text,
            calls, or text and then calls. With `auto`, text that begins like a call must be a call.
        parallel: whether to allow up to `MAX_CALLS` calls instead of one, if the format supports this.
        strict: names of tools whose schemas are fully enforced. For other tools, keywords that llguidance cannot
            enforce are ignored.
        message: grammar of output without calls; empty for any text. With `auto`, the output matches this grammar or
            consists of calls.
        reasons: whether to allow a reasoning message before the calls. Only used for the formats in `MESSAGES`, in
            which reasoning and calls are messages.
        untagged: whether plain JSON without tags may also be a call. Only used with `auto`, without `message`, and for
            at most `MAX_TOOLS` tools.

    Raises:
        ApiError: 400 `invalid_schema`: a tool's schema is invalid. 400 `unsupported_schema`: the tool-call format
            cannot express a tool's schema. 400 `invalid_grammar`: the chosen tool does not exist, `tools` is empty, or
            a tool's name is invalid.
    """
    if choice not in ("required", "auto"):
        if choice not in tools:
            raise ApiError(
                400, "invalid_grammar", f"there is no tool '{choice[:100]}' in 'tools'; add it", param="tool_choice"
            )
        tools = {choice: tools[choice]}
    if not tools:
        raise ApiError(
            400, "invalid_grammar", "there are no tools; send 'tools', or omit 'tool_choice'", param="tool_choice"
        )
    callable_tools = [CallableTool(index, name, tools[name], name in strict) for index, name in enumerate(tools)]
    rules = Rules(token_id)
    content = rules.include("message", message) if message and choice == "auto" else ""
    if tool_call_format in MESSAGES:
        limit = MAX_CALLS if parallel and tool_call_format != "harmony" else 1  # gpt-oss ends its answer after a call
        calls = _CALL_MESSAGES[tool_call_format](rules, callable_tools)
        return rules.serialized(_messages(rules, tool_call_format, calls, limit, choice == "auto", content, reasons))
    calls, *others = _FRAMES[tool_call_format](rules, callable_tools, MAX_CALLS if parallel else 1)
    if content:
        return rules.serialized(f"{content} | {calls.all(rules)}")
    # The output must begin with a call.
    if choice != "auto":
        return rules.serialized(calls.all(rules))
    # For untagged calls, each tool adds rules that are matched while the model writes text, so tools must be few.
    untagged = untagged and len(callable_tools) <= MAX_TOOLS
    known = TOOL_CALL_FORMATS[tool_call_format]
    text = rules.add("TEXT", without(known.openers, known.leading))
    either = [text, *(called.after(rules, text) for called in (calls, *others))]
    if untagged:
        either.append(untagged_calls(rules, callable_tools, MAX_CALLS if parallel else 1))
    return rules.serialized(_either(either))


# A function that returns the grammars of a list of calls, the usual form first. Its arguments are the rules, the tools
# and the maximum number of calls.
_Frame = Callable[[Rules, list[CallableTool], int], list[_Calls]]


def _tagged(call_grammar: Callable[[Rules, CallableTool], str]) -> _Frame:
    def frame(rules: Rules, callable_tools: list[CallableTool], limit: int) -> list[_Calls]:
        call = rules.add("call", _either(call_grammar(rules, tool) for tool in callable_tools))
        body = f'"\\n" {call} "\\n" {rules.marker("</tool_call>")}'
        again = f'"\\n" {rules.marker("<tool_call>")} {body}'
        calls = _several(call, "\n", limit)
        # Models also write calls in `<tools>` tags, because the prompt encloses the tools in these tags.
        mistaken = f'"\\n" {calls} "\\n</tools>"'
        return [_Calls("<tool_call>", f"{body} {_repeated(again, limit)}"), _Calls("<tools>", mistaken)]

    return frame


def _xml_call(rules: Rules, tool: CallableTool) -> str:
    return tagged_call(rules, tool, FUNCTION_XML)


def _qwen_xml(rules: Rules, callable_tools: list[CallableTool], limit: int) -> list[_Calls]:
    """Return the grammars of calls with and without the opening tag `<tool_call>`."""
    calls = _tagged(_xml_call)(rules, callable_tools, limit)
    bare = [call for tool in callable_tools if (call := bare_tagged_call(rules, tool, FUNCTION_XML))]
    if bare:
        called = rules.add("bare_call", _either(bare))
        again = f"{literal(_LINE + FUNCTION_XML.call)} {called}"
        calls.append(_Calls(FUNCTION_XML.call, f"{called} {_repeated(again, limit)}"))
    return calls


def _tagged_arguments(known: TaggedCalls, *, together: bool = False) -> _Frame:
    """Return the function that builds the grammars of calls with tagged arguments.

    If `together`, one pair of tags encloses all calls. Otherwise, each call has its own pair.
    """

    def frame(rules: Rules, callable_tools: list[CallableTool], limit: int) -> list[_Calls]:
        tags, line = known.tags, literal(_LINE) if known.tags.call else ""
        call = rules.add("call", _either(tagged_call(rules, tool, tags) for tool in callable_tools))
        close = rules.marker(tags.block_end)
        if together:
            return [_Calls(known.opener, f"{line} {_several(call, _LINE, limit)} {line} {close}")]
        body = f"{line} {call} {line} {close}"
        again = f'"\\n"? {rules.marker(known.opener)} {body}'
        return [_Calls(known.opener, f"{body} {_repeated(again, limit)}")]

    return frame


def _json_list(known: JsonCalls) -> _Frame:
    """Return the function that builds the grammars of calls in a JSON list."""

    def frame(rules: Rules, callable_tools: list[CallableTool], limit: int) -> list[_Calls]:
        call = rules.add("call", _either(json_call(rules, tool) for tool in callable_tools))
        close = rules.marker(known.closer) if known.closer else ""
        listed = f'"[" {_several(call, ", ", limit)} "]"'
        calls = [_Calls(known.opener, f"{listed} {close}")]
        if len(known.openers) > 1:
            calls.append(_Calls(known.openers[1], f'{_several(call, ", ", limit)} "]"'))
            if not rules.is_token(known.opener):  # Firefunction, which has no marker token and uses `functools[`
                calls.reverse()
        return calls

    return frame


def _cohere(rules: Rules, callable_tools: list[CallableTool], limit: int) -> list[_Calls]:
    """Return the grammar of calls in a JSON list with one call per line."""
    call = rules.add("call", _either(cohere_call(rules, tool) for tool in callable_tools))
    listed = f"{literal('[' + _INDENTED)} {_several(call, ',' + _INDENTED, limit)} {literal(_LINE + ']')}"
    return [_Calls(COHERE.opener, f"{listed} {rules.marker(COHERE.closer)}")]


def _command_r(rules: Rules, callable_tools: list[CallableTool], limit: int) -> list[_Calls]:
    """Return the grammar of calls in an indented JSON list in a code fence."""
    call = rules.add("call", _either(command_r_call(rules, tool) for tool in callable_tools))
    listed = f"{literal('```json' + _LINE + '[' + _INDENTED)} {_several(call, ',' + _INDENTED, limit)}"
    # The models' documentation shows a space before the fence. Their chat template writes a line break.
    return [_Calls(COMMAND_R.opener, f'(" " | "\\n") {listed} {literal(_LINE + "]")} "\\n"? "```"')]


def _kimi(rules: Rules, callable_tools: list[CallableTool], limit: int) -> list[_Calls]:
    """Return the grammars of a list of calls, and of one call without a list."""
    begin, head, end = (rules.marker(f"<|tool_call_{name}|>") for name in ("begin", "argument_begin", "end"))
    calls = (
        f"{literal(f'functions.{tool.name}:')} /[0-9]{{1,2}}/ {head} {tool.arguments(rules)}" for tool in callable_tools
    )
    one = rules.add("one", f"({_either(calls)}) {end}")
    call = rules.add("call", f"{begin} {one}")
    section_end = rules.marker("<|tool_calls_section_end|>")
    listed = _Calls("<|tool_calls_section_begin|>", f"{call} {_repeated(call, limit)} {section_end}")
    return [listed, _Calls("<|tool_call_begin|>", one)]


def _gemma4(rules: Rules, callable_tools: list[CallableTool], limit: int) -> list[_Calls]:
    call = rules.add("call", _either(gemma_call(rules, tool) for tool in callable_tools))
    body = f"{call} {rules.marker(GEMMA_CLOSE)}"
    return [_Calls(GEMMA_OPEN, f"{body} {_repeated(f'{rules.marker(GEMMA_OPEN)} {body}', limit)}")]


def _llama(rules: Rules, callable_tools: list[CallableTool], limit: int) -> list[_Calls]:
    call = rules.add("call", _either(schema_call(rules, tool, "parameters") for tool in callable_tools))
    return [_Calls(opener, _several(call, "; ", limit)) for opener in ("", "<|python_tag|>")]


def _pythonic(known: Pythonic) -> _Frame:
    """Return the function that builds the grammars of calls in a Python list.

    If the vocabulary has tokens that mark the beginning and the end of the list, these tokens are optional at the
    beginning of the output. After text, the markers are required.
    """

    def frame(rules: Rules, callable_tools: list[CallableTool], limit: int) -> list[_Calls]:
        call = rules.add("call", _either(python_call(rules, tool) for tool in callable_tools))
        listed = f'"[" {_several(call, ", ", limit)} "]"'
        marked = f"{listed} {rules.marker(known.end)}"
        either = f"({rules.marker(known.start)} {marked} | {listed})" if rules.is_token(known.start) else listed
        return [_Calls("", either), _Calls(known.start, marked)]

    return frame


def _olmo3(rules: Rules, callable_tools: list[CallableTool], limit: int) -> list[_Calls]:
    """Return the grammar of calls in lines between two markers."""
    call = rules.add("call", _either(python_call(rules, tool) for tool in callable_tools))
    body = f'"\\n"? {_several(call, _LINE, limit)} "\\n"? {rules.marker(OLMO_3.end)}'
    return [_Calls(OLMO_3.start, body)]


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
    """Return the grammars of a list of calls, and of one call without a list.

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


def _messages(
    rules: Rules, tool_call_format: str, calls: str, limit: int, may_message: bool, content: str, reasons: bool
) -> str:
    """Return the grammar of output that consists of messages with headers.

    The output ends with 1 to `limit` messages that match `calls`. If `reasons`, reasoning may precede the calls. If
    `may_message`, text may precede the calls, and an answer that matches `content` (any text if empty) may replace the
    calls.
    """
    messages = MESSAGES[tool_call_format]
    call = rules.add("call", calls)
    called = f"{call} {_repeated(f'{messages.again(rules)} {call}', limit)}"
    reasoning = messages.reasoning(rules) if reasons else ""
    if not may_message:
        return f"{reasoning} {called}"
    # In Muse Glimmer, text before a call may have the same header as an answer. If the answer must match `content`, no
    # text is allowed before a call, because an answer that does not match `content` would pass as text before a call.
    before = "" if content and messages.interim in messages.answer else messages.before_call(rules)
    return f"{reasoning} {before} ({called} | {messages.final(rules, content)})"


def _harmony(rules: Rules, callable_tools: list[CallableTool]) -> str:
    channel, message, constrain = map(rules.marker, ("<|channel|>", "<|message|>", "<|constrain|>"))
    head = "commentary to=functions."
    return _either(
        f'{channel} {literal(f"{head}{tool.name} ")} {constrain} "json" {message} {tool.arguments(rules)}'
        for tool in callable_tools
    )


def _muse_glimmer(rules: Rules, callable_tools: list[CallableTool]) -> str:
    known = MuseGlimmer.calls
    opener, closer = literal(known.opener + _LINE), literal(_LINE + known.tags.block_end)
    return _either(
        f"{literal(f' to={tool.name}')} {rules.marker('<|message|>')} {opener} "
        f"{tagged_call(rules, tool, known.tags)} {closer}"
        for tool in callable_tools
    )


_CALL_MESSAGES = {"harmony": _harmony, "muse_glimmer": _muse_glimmer}

_LINE, _INDENTED = "\n", "\n    "
_FRAMES: dict[str, _Frame] = {
    "hermes": _tagged(json_call),
    "hermes_strict": _tagged(json_call),
    "qwen_xml": _qwen_xml,
    "llama3_json": _llama,
    "mistral": _mistral,
    "deepseek": _deepseek,
    "cohere": _cohere,
    "command_r": _command_r,
    "kimi_k2": _kimi,
    "gemma4": _gemma4,
    "olmo3": _olmo3,
    **{known.name: _pythonic(known) for known in (LLAMA_4, LFM2)},
    **{known.name: _json_list(known) for known in (GRANITE, HUNYUAN, NEMOTRON, PHI4_MINI)},
    **{known.name: _tagged_arguments(known, together=known is MINIMAX_M2) for known in (GLM, MINIMAX_M2, SEED_OSS)},
}


def _either(bodies: Iterable[str]) -> str:
    return " | ".join(bodies)


def _several(item: str, separator: str, limit: int) -> str:
    return f"{item} {_repeated(f'{literal(separator)} {item}', limit)}"


def _repeated(another: str, limit: int) -> str:
    return f"({another}){{0,{limit - 1}}}" if limit > 1 else ""


def untagged_calls(rules: Rules, tools: list[CallableTool], limit: int) -> str:
    """Return a Lark expression for text, then 1 to `limit` calls in plain JSON."""
    call = rules.add("untagged_call", " | ".join(json_call(rules, tool) for tool in tools))
    listed = _calls(rules, tools, "list", rf"{_LEAD}\[\s*{_OBJECT}")
    single = _calls(rules, tools, "object", f"{_LEAD}{_OBJECT}")
    if limit > 1:
        listed += f' (", " {call}){{0,{limit - 1}}}'
        single += f' ("\\n" {call}){{0,{limit - 1}}}'
    return f'({listed} "\\n"? "]" | {single}) "\\n```"?'


def _calls(rules: Rules, tools: list[CallableTool], kind: str, lead: str) -> str:
    """Return a Lark expression for text that matches the regex `lead`, then a call."""
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
