"""Request body of `POST /v1/responses/compact`, which replaces a conversation by a summary (compaction)."""

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field, PlainValidator

from helexa.core.errors import invalid_body
from helexa.core.wire.openai_chat import ChatRequest
from helexa.core.wire.responses.input import Item
from helexa.core.wire.responses.request import ResponsesRequest, input_items

_PROMPT = (
    "Summarize this conversation for an assistant that will continue it and cannot see it. Keep every fact, name, "
    "number, decision, open question and unfinished task. Write only the summary."
)


class CompactRequest(ResponsesRequest):
    """The body of `POST /v1/responses/compact`: a conversation to summarize. Tools in the body are ignored."""

    input: Annotated[
        list[dict[str, Any]],
        PlainValidator(
            lambda value: [] if value is None else input_items(value),
            json_schema_input_type=str | None | Annotated[list[dict[str, Any]], Field(min_length=1)],
        ),
    ] = Field(default_factory=list[dict[str, Any]])

    def chat(self, history: Sequence[Item] = ()) -> ChatRequest:
        """Return the chat request that lets the model summarize the conversation.

        The conversation consists of `history`, the items of earlier responses, and the items of `input`.

        Raises:
            ApiError: 400: the conversation is empty, or a field is invalid or not supported.
        """
        if not self.input and not history:
            raise invalid_body("input: must not be empty", "input")
        summary_prompt = {"type": "message", "role": "user", "content": _PROMPT}
        request = self.model_copy(update={"input": [*self.input, summary_prompt], "tools": None, "tool_choice": None})
        return ResponsesRequest.chat(request, history)
