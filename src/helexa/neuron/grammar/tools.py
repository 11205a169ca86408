"""Build grammars of answers with tool calls, in the model's tool-call format."""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from helexa.core.errors import ApiError
from helexa.neuron.grammar.calls import json_call, python_call, schema_call, xml_call
from helexa.neuron.grammar.offer import Offer
from helexa.neuron.grammar.reasoning import harmony_final, harmony_message, harmony_text
from helexa.neuron.grammar.rules import Rules, TokenId, literal, without
from helexa.neuron.parsers.formats.choice import FAMILIES
from helexa.neuron.parsers.output import Tools

MAX_CALLS = 16
"""Maximum number of calls in one message; without a limit, small models may call tools forever."""


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


def for_tools(
    family: str,
    tools: Tools,
    choice: str,
    parallel: bool,
    *,
    strict: Collection[str] = (),
    token_id: TokenId = lambda _: None,
    message: str = "",
    reasons: bool = True,
) -> str:
    """Return the grammar of an answer that calls tools, with arguments that match the tools' schemas.

    Args:
        family: name of the tool-call format.
        tools: callable tools.
        choice: `required` allows only calls, a tool's name only calls of this tool, and `auto` text, calls or both.
            With `auto`, text that begins like a call must be a call.
        parallel: allow several calls, if the format supports them.
        strict: names of tools whose schemas are fully enforced. For other tools, keywords that llguidance cannot
            enforce are ignored.
        token_id: returns the token id of a marker, or None.
        message: grammar of an answer without calls; with `auto`, the output is either this answer or calls.
        reasons: allow reasoning before the answer, in formats that frame reasoning like calls (Harmony).

    Raises:
        ApiError: 400 `invalid_schema` or `unsupported_schema`, naming the tool, or `invalid_grammar`: the chosen tool
            does not exist, there are no tools, or a tool's name is invalid.
    """
    if choice not in ("required", "auto"):
        if choice not in tools:
            raise ApiError(400, "invalid_grammar", f"there is no tool '{choice[:100]}'", param="tool_choice")
        tools = {choice: tools[choice]}
    if not tools:
        raise ApiError(400, "invalid_grammar", "there are no tools", param="tool_choice")
    offers = [Offer(index, name, tools[name], name in strict) for index, name in enumerate(tools)]
    rules = Rules(token_id)
    content = rules.include("message", message) if message and choice == "auto" else ""
    if family == "harmony":
        return rules.serialised(_harmony(rules, offers, choice == "auto", content, reasons))
    calls = _FRAMES[family](rules, offers, MAX_CALLS if parallel else 1)
    if content:
        return rules.serialised(f"{content} | {calls.all(rules)}")
    if choice != "auto":
        return rules.serialised(calls.all(rules))
    known = FAMILIES[family]
    text = rules.add("TEXT", without(known.openers, known.leading))
    if calls.opener:
        return rules.serialised(f"{text} | {rules.text_to('', calls.opener, text)} {calls.body}")
    return rules.serialised(f"{text} | {calls.body}")


def _tagged(call_grammar: Callable[[Rules, Offer], str]) -> Callable[[Rules, list[Offer], int], _Calls]:
    def frame(rules: Rules, offers: list[Offer], limit: int) -> _Calls:
        call = rules.add("call", _either(call_grammar(rules, offer) for offer in offers))
        body = f'"\\n" {call} "\\n" {rules.marker("</tool_call>")}'
        again = f'"\\n" {rules.marker("<tool_call>")} {body}'
        return _Calls("<tool_call>", f"{body} {_repeated(again, limit)}")

    return frame


def _llama(rules: Rules, offers: list[Offer], limit: int) -> _Calls:
    call = rules.add("call", _either(schema_call(rules, offer, "parameters") for offer in offers))
    return _Calls("", _several(call, "; ", limit))


def _pythonic(rules: Rules, offers: list[Offer], limit: int) -> _Calls:
    """Return the grammar of calls as a Python list. Tokens around the list are optional if the vocabulary has them."""
    call = rules.add("call", _either(python_call(rules, offer) for offer in offers))
    listed = f'"[" {_several(call, ", ", limit)} "]"'
    start, end = "<|python_start|>", "<|python_end|>"
    if rules.is_token(start):
        listed = f"({rules.marker(start)} {listed} {rules.marker(end)} | {listed})"
    return _Calls("", listed)


def _mistral(rules: Rules, offers: list[Offer], limit: int) -> _Calls:
    """Return the grammar of Mistral's older format, and also of the newer format if the vocabulary has its token."""
    opener, arguments = "[TOOL_CALLS]", "[ARGS]"
    call = rules.add("call", _either(json_call(rules, offer) for offer in offers))
    body = f'" "? "[" {_several(call, ", ", limit)} "]"'
    if rules.is_token(arguments):
        heads = (f"{literal(offer.name)} {rules.marker(arguments)} {offer.arguments(rules)}" for offer in offers)
        named_call = rules.add("named", _either(heads))
        body = f"({body} | {named_call} {_repeated(f'{rules.marker(opener)} {named_call}', limit)})"
    return _Calls(opener, body)


def _deepseek(rules: Rules, offers: list[Offer], limit: int) -> _Calls:
    """Return the grammar of DeepSeek's calls in two formats: that of V3 and R1, and that of V3.1."""
    begin, separator, end = (rules.marker(f"<｜tool▁{name}｜>") for name in ("call▁begin", "sep", "call▁end"))
    either: list[str] = []
    for offer in offers:
        arguments = rules.add(f"arguments_{offer.index}", offer.arguments(rules))
        fenced = literal(offer.name + "\n```json\n") + f' {arguments} "\\n```"'
        either += [f'"function" {separator} {fenced}', f"{literal(offer.name)} {separator} {arguments}"]
    call = rules.add("call", f"{begin} ({_either(either)}) {end}")
    all_end = rules.marker("<｜tool▁calls▁end｜>")
    again = f'"\\n"? {call}'
    return _Calls("<｜tool▁calls▁begin｜>", f"{call} {_repeated(again, limit)} {all_end}")


def _harmony(rules: Rules, offers: list[Offer], may_message: bool, content: str, reasons: bool) -> str:
    """Return the grammar of an answer with tool calls in the Harmony format.

    The answer is optional reasoning, then one call, which ends the answer. If `may_message`, text may precede the call,
    and
    a final message may replace the call.
    """
    channel, message, constrain = map(rules.marker, ("<|channel|>", "<|message|>", "<|constrain|>"))
    head = "commentary to=functions."
    calls = _either(
        f'{literal(f"{head}{offer.name} ")} {constrain} "json" {message} {offer.arguments(rules)}' for offer in offers
    )
    reasoning = harmony_message(rules, "analysis") if reasons else ""
    if not may_message:
        return f"{reasoning} {channel} ({calls})"
    final = harmony_final(rules, content or harmony_text(rules))
    return f"{reasoning} {harmony_message(rules, 'commentary')} ({channel} ({calls}) | {final})"


_FRAMES: dict[str, Callable[[Rules, list[Offer], int], _Calls]] = {
    "hermes": _tagged(json_call),
    "hermes_strict": _tagged(json_call),
    "qwen_xml": _tagged(xml_call),
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
