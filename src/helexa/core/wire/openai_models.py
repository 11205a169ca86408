"""Response body of `GET /v1/models`: OpenAI's format, extended by token limits and capabilities."""

from typing import Literal, NotRequired, TypedDict

from helexa.core.fleet import ModelInfo


class LimitEntry(TypedDict):
    """Maximum number of tokens of a model: context length, input and output. Unknown limits are absent."""

    context: int
    input: NotRequired[int]
    output: NotRequired[int]


class ModelEntry(TypedDict):
    """One model in the list.

    `max_model_len` and similar fields repeat `limit`, because some agents read only these fields.
    """

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
    """Convert a node's report about a model to an entry of `/v1/models`. `created` is in Unix seconds."""
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
    """Return the response body with the given list entries."""
    return ModelList(object="list", data=entries)
