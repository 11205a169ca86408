"""Build the grammar that constrains an output: JSON, regex or tool calls."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from helexa.core.errors import unsupported_parameter
from helexa.neuron.grammar import (
    after_reasoning,
    for_choice,
    for_lark,
    for_regex,
    for_schema,
    for_tools,
    in_final_channel,
)
from helexa.neuron.grammar.single_call import is_name
from helexa.neuron.lifecycle.served_model_and_context_limit import ServedModel
from helexa.neuron.parsers.output import Tools

if TYPE_CHECKING:  # these modules import pydantic, which is slow, and which private engines rarely need
    from helexa.core.wire.openai_chat import ChatRequest
    from helexa.core.wire.request import AnswerShape, GenerationRequest
    from helexa.neuron.requests.text_chat import TextChat


@dataclass(frozen=True)
class Constraint:
    """Grammars that constrain the output for one answer."""

    grammar: str  # grammar of the whole output, including reasoning; empty if the output is unconstrained
    # grammar of the output after the server has closed reasoning that exceeds its budget; empty if this output is
    # unconstrained
    after_reasoning: str = ""


async def completion_constraint(model: ServedModel, request: "GenerationRequest") -> Constraint | None:
    """Return a completion's constraint; None for unconstrained output.

    Raises:
        ApiError: status 400: the requested structure is not supported.
    """
    if (shape := request.shape) is None:
        return None
    grammar = await asyncio.to_thread(_shape_grammar, shape)
    await model.grammars.compile_check(grammar, shape.param)
    return Constraint(grammar)


async def chat_constraint(
    model: ServedModel,
    chat: "ChatRequest | TextChat",
    tools: Sequence[Mapping[str, Any]],
    prompt: Sequence[int],
    thinks: bool,
) -> Constraint | None:
    """Return a chat's constraint; None for unconstrained output.

    Args:
        tools: tools of the request, in the OpenAI format.
        thinks: whether the model may reason before the text, even if the prompt does not end with the opening marker
            of the reasoning.

    Raises:
        ApiError: status 400: the requested structure is not supported, or the model has no tool-call format.
    """
    # Names of the tools whose schema the grammar enforces. If the request forces a call, these are all tools, except
    # those with `strict` set to false.
    strict = frozenset(tool["function"]["name"] for tool in tools if _is_strict(tool["function"], chat.must_call))
    schemas = schemas_of(tools)
    if chat.shape is None and not (tools and (chat.must_call or strict)):
        return _after_closed_reasoning(model, chat, schemas)
    if tools:
        constraint = await asyncio.to_thread(_call_constraint, model, chat, schemas, strict, prompt, thinks)
        param = "tool_choice" if chat.must_call else "tools" if chat.shape is None else chat.shape.param
    else:
        assert chat.shape is not None
        constraint = await asyncio.to_thread(_shape_constraint, model, chat.shape, prompt, thinks)
        param = chat.shape.param
    await model.grammars.compile_check(constraint.grammar, param)
    return constraint


def schemas_of(tools: Sequence[Mapping[str, Any]]) -> Tools:
    """Return the JSON Schema of each tool's arguments, by tool name."""
    return {tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in tools}


def _is_strict(function: Mapping[str, Any], forced: bool) -> bool:
    """Return the option `strict` of the tool `function`; `forced` if it is not set."""
    strict = function.get("strict")
    return forced if strict is None else bool(strict)


def _shape_grammar(shape: "AnswerShape") -> str:
    if shape.kind == "schema":
        return for_schema(shape.value, lenient=shape.lenient)
    return {"regex": for_regex, "choice": for_choice, "lark": for_lark}[shape.kind](shape.value)


def _shape_constraint(model: ServedModel, shape: "AnswerShape", prompt: Sequence[int], thinks: bool) -> Constraint:
    grammar, token_id = _shape_grammar(shape), model.text.tokenizer.token_id
    known = model.text.output_format.tool_call_format
    if model.text.output_format.frames_calls:
        assert known is not None
        build = partial(in_final_channel, grammar, tool_call_format=known.name, token_id=token_id)
        return Constraint(build(reasons=True), build(reasons=False))
    return Constraint(_with_reasoning(model, grammar, prompt, thinks), grammar)


def _call_constraint(
    model: ServedModel,
    chat: "ChatRequest | TextChat",
    tools: Tools,
    strict: frozenset[str],
    prompt: Sequence[int],
    thinks: bool,
) -> Constraint:
    tool_call_format = model.text.output_format.tool_call_format
    if tool_call_format is None:
        param = "tool_choice" if chat.must_call else "tools.strict" if chat.shape is None else chat.shape.param
        raise unsupported_parameter(
            param, f"'{param}': model '{model.id}' has no tool-call format; choose another model"
        )
    shape = None if chat.must_call else chat.shape
    build = partial(
        for_tools,
        tool_call_format.name,
        tools if chat.forced_tool is None else {chat.forced_tool: tools[chat.forced_tool]},
        "required" if chat.must_call else "auto",
        chat.parallel_tool_calls is not False and chat.forced_tool is None,
        strict=strict,
        token_id=model.text.tokenizer.token_id,
        message="" if shape is None else _shape_grammar(shape),
        untagged=model.text.output_format.has_untagged_calls,
    )
    remainder = build(reasons=False)
    if model.text.output_format.frames_calls:
        return Constraint(build(), remainder)
    return Constraint(_with_reasoning(model, remainder, prompt, thinks), remainder)


def _with_reasoning(model: ServedModel, grammar: str, prompt: Sequence[int], thinks: bool) -> str:
    formats = model.text.output_format
    begun = formats.is_inside(prompt)
    if formats.reasoning is None or not (begun or (thinks and not formats.is_over(prompt))):
        return grammar
    return after_reasoning(grammar, formats.reasoning, begun=begun, token_id=model.text.tokenizer.token_id)


def _after_closed_reasoning(model: ServedModel, chat: "ChatRequest | TextChat", tools: Tools) -> Constraint | None:
    """Return a constraint that forbids a second reasoning block, or None.

    The constraint applies to output after the server has closed the reasoning. The result is None if the request has no
    limit of reasoning tokens or no tools, or if the output format needs no such constraint.
    """
    callable_tools = {name: {"type": "object"} for name in tools if is_name(name)}
    known = model.text.output_format.tool_call_format
    if not (known and model.text.output_format.frames_calls and callable_tools and chat.max_reasoning_tokens):
        return None
    token_id = model.text.tokenizer.token_id
    return Constraint("", for_tools(known.name, callable_tools, "auto", False, token_id=token_id, reasons=False))
