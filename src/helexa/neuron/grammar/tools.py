"""Grammars that make a model call tools, in the notation that its parser reads."""

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
"""How many calls an answer may have that is made to call tools; without an end a small model may go on for ever."""


@dataclass(frozen=True)
class _Calls:
    """Calls as a family writes them.

    Attributes:
        opener: the marker that they begin with; "" if they just begin.
        rest: what follows it.
    """

    opener: str
    rest: str

    def all(self, rules: Rules) -> str:
        return f"{rules.marker(self.opener)} {self.rest}" if self.opener else self.rest


def for_tools(
    family: str,
    tools: Tools,
    choice: str,
    parallel: bool,
    *,
    strict: Collection[str] = (),
    token_id: TokenId = lambda _: None,
    answer: str = "",
    reasons: bool = True,
) -> str:
    """Calls of tools with arguments that their schemas accept.

    Args:
        family: the name of the notation.
        tools: the tools on offer.
        choice: `required`: nothing but calls; a tool's name: nothing but calls of that; `auto`: text, calls or both,
            where what begins as a call does is one.
        parallel: there may be several, as far as the family has that.
        strict: the tools whose schemas must be followed to the letter. What llguidance cannot enforce of the others' is
            left out of account.
        token_id: finds the markers that are tokens.
        answer: the grammar of an answer, with `auto`: it is that or calls.
        reasons: reasoning may come before, where it is framed as calls are, as in harmony.

    Raises:
        ApiError: 400 `invalid_schema` or `unsupported_schema`, naming the tool, or `invalid_grammar`: there is no such
            tool, or none at all, or one whose name cannot be written.
    """
    if choice not in ("required", "auto"):
        if choice not in tools:
            raise ApiError(400, "invalid_grammar", f"there is no tool '{choice[:100]}'", param="tool_choice")
        tools = {choice: tools[choice]}
    if not tools:
        raise ApiError(400, "invalid_grammar", "there are no tools", param="tool_choice")
    offers = [Offer(index, name, tools[name], name in strict) for index, name in enumerate(tools)]
    rules = Rules(token_id)
    reply = rules.include("answer", answer) if answer and choice == "auto" else ""
    if family == "harmony":
        return rules.serialised(_harmony(rules, offers, choice == "auto", reply, reasons))
    calls = _FRAMES[family](rules, offers, MAX_CALLS if parallel else 1)
    if reply:
        return rules.serialised(f"{reply} | {calls.all(rules)}")
    if choice != "auto":
        return rules.serialised(calls.all(rules))
    known = FAMILIES[family]
    text = rules.add("TEXT", without(known.openers, known.leading))
    if calls.opener:
        return rules.serialised(f"{text} | {rules.text_to('', calls.opener, text)} {calls.rest}")
    return rules.serialised(f"{text} | {calls.rest}")


def _tagged(one: Callable[[Rules, Offer], str]) -> Callable[[Rules, list[Offer], int], _Calls]:
    def frame(rules: Rules, offers: list[Offer], limit: int) -> _Calls:
        call = rules.add("call", _either(one(rules, offer) for offer in offers))
        rest = f'"\\n" {call} "\\n" {rules.marker("</tool_call>")}'
        again = f'"\\n" {rules.marker("<tool_call>")} {rest}'
        return _Calls("<tool_call>", f"{rest} {_more(again, limit)}")

    return frame


def _llama(rules: Rules, offers: list[Offer], limit: int) -> _Calls:
    call = rules.add("call", _either(schema_call(rules, offer, "parameters") for offer in offers))
    return _Calls("", _several(call, "; ", limit))


def _pythonic(rules: Rules, offers: list[Offer], limit: int) -> _Calls:
    """With or without the tokens around the list, as the model likes, where it has them."""
    call = rules.add("call", _either(python_call(rules, offer) for offer in offers))
    listed = f'"[" {_several(call, ", ", limit)} "]"'
    start, end = "<|python_start|>", "<|python_end|>"
    if rules.is_token(start):
        listed = f"({rules.marker(start)} {listed} {rules.marker(end)} | {listed})"
    return _Calls("", listed)


def _mistral(rules: Rules, offers: list[Offer], limit: int) -> _Calls:
    """The model takes the older or the newer notation, if it has a token of the newer one's."""
    opener, arguments = "[TOOL_CALLS]", "[ARGS]"
    call = rules.add("call", _either(json_call(rules, offer) for offer in offers))
    rest = f'" "? "[" {_several(call, ", ", limit)} "]"'
    if rules.is_token(arguments):
        heads = (f"{literal(offer.name)} {rules.marker(arguments)} {offer.arguments(rules)}" for offer in offers)
        named = rules.add("named", _either(heads))
        rest = f"({rest} | {named} {_more(f'{rules.marker(opener)} {named}', limit)})"
    return _Calls(opener, rest)


def _deepseek(rules: Rules, offers: list[Offer], limit: int) -> _Calls:
    """The model takes the notation of V3 and R1 or that of V3.1."""
    begin, separator, end = (rules.marker(f"<｜tool▁{part}｜>") for part in ("call▁begin", "sep", "call▁end"))
    either: list[str] = []
    for offer in offers:
        arguments = rules.add(f"arguments_{offer.index}", offer.arguments(rules))
        fenced = literal(offer.name + "\n```json\n") + f' {arguments} "\\n```"'
        either += [f'"function" {separator} {fenced}', f"{literal(offer.name)} {separator} {arguments}"]
    call = rules.add("call", f"{begin} ({_either(either)}) {end}")
    all_end = rules.marker("<｜tool▁calls▁end｜>")
    again = f'"\\n"? {call}'
    return _Calls("<｜tool▁calls▁begin｜>", f"{call} {_more(again, limit)} {all_end}")


def _harmony(rules: Rules, offers: list[Offer], may_answer: bool, reply: str, reasons: bool) -> str:
    """Reasoning, if the model wants to, then one call, which ends its turn; or text, then a call or an answer."""
    channel, message, constrain = map(rules.marker, ("<|channel|>", "<|message|>", "<|constrain|>"))
    head = "commentary to=functions."
    calls = _either(
        f'{literal(f"{head}{offer.name} ")} {constrain} "json" {message} {offer.arguments(rules)}' for offer in offers
    )
    reasoning = harmony_message(rules, "analysis") if reasons else ""
    if not may_answer:
        return f"{reasoning} {channel} ({calls})"
    final = harmony_final(rules, reply or harmony_text(rules))
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


def _several(one: str, separator: str, limit: int) -> str:
    return f"{one} {_more(f'{literal(separator)} {one}', limit)}"


def _more(another: str, limit: int) -> str:
    return f"({another}){{0,{limit - 1}}}" if limit > 1 else ""
