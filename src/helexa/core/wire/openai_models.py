"""OpenAI's list of models, with the limits and capabilities that agents read."""

from typing import Literal, NotRequired, TypedDict

from helexa.core.fleet import ModelInfo


class LimitEntry(TypedDict):
    """Token limits; unknown limits are absent."""

    context: int
    input: NotRequired[int]
    output: NotRequired[int]


class ModelEntry(TypedDict):
    """One model. The flat limits repeat the nested limits, because some agents read only flat limits."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: Literal["helexa"]
    loaded: bool
    capabilities: NotRequired[list[str]]
    limit: NotRequired[LimitEntry]
    tool_call: bool
    reasoning: bool
    max_model_len: NotRequired[int]
    max_input_tokens: NotRequired[int]
    max_output_tokens: NotRequired[int]


class ModelList(TypedDict):
    """The body of `GET /v1/models`."""

    object: Literal["list"]
    data: list[ModelEntry]


def model_entry(info: ModelInfo, created: int) -> ModelEntry:
    """Return the list entry of a model; `created` is in Unix seconds."""
    entry = ModelEntry(
        id=info.id,
        object="model",
        created=created,
        owned_by="helexa",
        loaded=info.status == "loaded",
        tool_call=info.tool_call,
        reasoning=info.reasoning,
    )
    if info.capabilities:
        entry["capabilities"] = info.capabilities
    if info.limit is not None:
        entry["limit"] = LimitEntry(context=info.limit.context)
        entry["max_model_len"] = info.limit.context
        if info.limit.input is not None:
            entry["limit"]["input"] = entry["max_input_tokens"] = info.limit.input
        if info.limit.output is not None:
            entry["limit"]["output"] = entry["max_output_tokens"] = info.limit.output
    return entry


def model_list(entries: list[ModelEntry]) -> ModelList:
    """Build the list of models."""
    return ModelList(object="list", data=entries)
