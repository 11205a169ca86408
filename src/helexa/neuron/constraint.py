"""What holds an answer to the shape that its request wants, or makes it call tools."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from helexa.core.errors import unsupported_parameter
from helexa.core.wire.answer_shape import AnswerShape
from helexa.core.wire.generation import GenerationRequest
from helexa.core.wire.openai_chat import ChatRequest
from helexa.neuron.grammar import for_choice, for_lark, for_regex, for_schema, for_tools
from helexa.neuron.model import ServedModel
from helexa.neuron.parsers.output import Tools


@dataclass(frozen=True)
class Constraint:
    """A grammar of the answer.

    Attributes:
        after: the tokens that it begins after; none if it begins at once.
        calls: it has calls in it.
    """

    grammar: str
    after: tuple[int, ...] = ()
    calls: bool = False


async def completion_constraint(model: ServedModel, request: GenerationRequest) -> Constraint | None:
    """What holds a continuation to the shape that is asked for.

    Raises:
        ApiError: 400, the shape cannot be had.
    """
    if (shape := request.shape) is None:
        return None
    grammar = await asyncio.to_thread(_shaped, shape, False)
    await model.grammars.compile_check(grammar, shape.param)
    return Constraint(grammar)


async def chat_constraint(
    model: ServedModel, chat: ChatRequest, tools: Sequence[Mapping[str, Any]], prompt: list[int], thinks: bool | None
) -> tuple[Constraint | None, list[int]]:
    """What holds an answer to the shape or the calls that are asked for, and the prompt for it.

    Where a model may think or not, as it likes, the prompt begins the reasoning: a grammar has to know.

    Raises:
        ApiError: 400, the shape cannot be had, or the model has no notation for calls.
    """
    strict = frozenset(tool["function"]["name"] for tool in tools if tool["function"].get("strict"))
    if chat.shape is None and not (tools and (chat.must_call or strict)):
        return None, prompt
    notation = model.text.notation
    if thinks is not False and model.text.template.mentions("enable_thinking"):
        prompt = notation.begin_reasoning(prompt)
    after = notation.begin_of_answer(prompt)
    if not tools:
        assert chat.shape is not None
        grammar = await asyncio.to_thread(_shaped, chat.shape, bool(after) and not notation.frames_calls)
        param = chat.shape.param
    else:
        after = [] if notation.frames_calls else after
        grammar = await asyncio.to_thread(_called, model, chat, schemas_of(tools), strict, bool(after))
        param = "tool_choice" if chat.must_call else "tools" if chat.shape is None else chat.shape.param
    await model.grammars.compile_check(grammar, param)
    return Constraint(grammar, tuple(after), calls=bool(tools)), prompt


def schemas_of(tools: Sequence[Mapping[str, Any]]) -> Tools:
    """The JSON Schema of each tool's arguments, by name."""
    return {tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in tools}


def _shaped(shape: AnswerShape, after_thinking: bool) -> str:
    if shape.kind == "schema":
        return for_schema(shape.value, lenient=shape.lenient, after_thinking=after_thinking)
    build = {"regex": for_regex, "choice": for_choice, "lark": for_lark}[shape.kind]
    return build(shape.value, after_thinking=after_thinking)


def _called(model: ServedModel, chat: ChatRequest, tools: Tools, strict: frozenset[str], after_thinking: bool) -> str:
    family = model.text.notation.family
    if family is None:
        param = "tool_choice" if chat.must_call else "tools.strict" if chat.shape is None else chat.shape.param
        raise unsupported_parameter(param, f"'{param}': model '{model.id}' has no notation for calls of tools")
    shape = None if chat.must_call else chat.shape
    return for_tools(
        family.name,
        tools if chat.forced_tool is None else {chat.forced_tool: tools[chat.forced_tool]},
        "required" if chat.must_call else "auto",
        chat.parallel_tool_calls is not False and chat.forced_tool is None,
        strict=strict,
        token_id=model.text.tokenizer.token_id,
        after_thinking=after_thinking,
        answer="" if shape is None else _shaped(shape, False),
    )
