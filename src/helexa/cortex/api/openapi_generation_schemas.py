"""Bodies in OpenAI's and Anthropic's formats, for the OpenAPI document.

The routes build and forward these bodies as dicts and bytes. Requests in OpenAI's formats are in `helexa.core.wire`.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=0)]
Name = Annotated[str, Field(min_length=1)]
Blocks = str | list[dict[str, Any]]


def _never_null(schema: dict[str, Any]) -> None:
    for name, value in schema["properties"].items():
        if name not in schema.get("required", ()) and value.get("default", "") is None:
            del value["default"]
            kinds = [kind for kind in value.pop("anyOf") if kind != {"type": "null"}]
            value |= kinds[0] if len(kinds) == 1 else {"anyOf": kinds}


class Body(BaseModel):
    """Base class of schemas of bodies that the gateway itself builds.

    A field with the default None is absent if it has no value.
    """

    # Only the OpenAPI document and tests use the validators. They are built on first use, so the gateway starts faster.
    model_config = ConfigDict(defer_build=True, json_schema_extra=_never_null)


class ForwardedBody(BaseModel):
    """Base class of reply schemas: a body that may come from a third-party node.

    Its optional fields may be null, and it may have other fields.
    """

    model_config = ConfigDict(defer_build=True)


class ErrorDetail(ForwardedBody):
    """Message, type and code of an error."""

    message: str
    type: str
    code: str | None = None
    param: str | None = None


class Error(ForwardedBody):
    """An error in OpenAI's format."""

    error: ErrorDetail


class AnthropicErrorDetail(Body):
    """Type and message of an error."""

    type: str
    message: str


class AnthropicError(Body):
    """An error in Anthropic's format."""

    type: Literal["error"]
    error: AnthropicErrorDetail
    request_id: str | None


class PromptTokensDetails(Body):
    """Schema in the `usage` of a reply: parts of the prompt tokens."""

    cached_tokens: Count | None = None


class CompletionTokensDetails(Body):
    """Schema in the `usage` of a reply: parts of the completion tokens."""

    reasoning_tokens: Count | None = None


class Usage(Body):
    """Token counts of a request."""

    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count
    prompt_tokens_details: PromptTokensDetails | None = None
    completion_tokens_details: CompletionTokensDetails | None = None


class AnswerMessage(Body):
    """Schema in a chat reply: the message of one choice."""

    role: str


class ChatChoice(ForwardedBody):
    """Schema in a chat reply: one answer to a chat request."""

    message: AnswerMessage
    index: Count = 0
    finish_reason: str | None = None


class ChatCompletion(Body):
    """Reply schema of `POST /v1/chat/completions`: a chat completion."""

    id: str
    object: Literal["chat.completion"]
    model: str
    choices: list[ChatChoice]
    created: int | None = None
    usage: Usage | None = None


class CompletionChoice(ForwardedBody):
    """Schema in a text completion reply: one answer to the request."""

    text: str
    index: Count = 0
    finish_reason: str | None = None


class Completion(Body):
    """Reply schema of `POST /v1/completions`: a text completion."""

    id: str
    object: Literal["text_completion"]
    model: str
    choices: list[CompletionChoice]
    created: int | None = None
    usage: Usage | None = None


class ResponsesAnswer(Body):
    """Reply schema of `POST /v1/responses`: a response of the Responses API."""

    id: str
    object: Literal["response"]
    output: list[dict[str, Any]]


class IoTokens(Body):
    """Token counts of a request."""

    input_tokens: Count | None = None
    output_tokens: Count | None = None


class Compaction(Body):
    """Reply schema of `POST /v1/responses/compact`: the summary of a conversation."""

    id: str
    object: Literal["response.compaction"]
    output: list[dict[str, Any]]
    created_at: int | None = None
    usage: IoTokens | None = None


class ItemList(ForwardedBody):
    """Reply schema of `GET /v1/responses/.../input_items`: a page of input items."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    has_more: bool
    first_id: str | None = None
    last_id: str | None = None


class DeletedResponse(Body):
    """Reply schema of `DELETE /v1/responses/...`: the stored response was deleted."""

    id: str
    object: Literal["response"]
    deleted: bool


class Embedding(Body):
    """Schema in the reply of `POST /v1/embeddings`: the embedding of one input."""

    index: Count
    embedding: list[float] | str


class Embeddings(Body):
    """Reply schema of `POST /v1/embeddings`: the embeddings of all inputs."""

    object: Literal["list"]
    data: list[Embedding]


class ImageRequest(ForwardedBody):
    """Body schema of `POST /v1/images/generations`: a request to create images."""

    model: Name
    prompt: str
    n: int | None = None
    size: str | None = None


class Image(Body):
    """Schema in an image reply: one image, as a URL or in base64."""

    url: str | None = None
    b64_json: str | None = None


class Images(Body):
    """Reply schema of `POST /v1/images/generations`: the created images."""

    data: list[Image]
    created: int | None = None


class Turn(Body):
    """Schema in a Messages API request: one message of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: Blocks


class MessagesTool(Body):
    """Schema in a Messages API request: a tool that the model may call."""

    name: Name
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class MessagesToolChoice(Body):
    """Schema in a Messages API request: which tools the model may or must call."""

    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None


class CountRequest(Body):
    """Body schema of `POST /v1/messages/count_tokens`: a prompt to count."""

    model: Name
    messages: Annotated[list[Turn], Field(min_length=1)]
    system: Blocks | None = None
    tools: list[MessagesTool] | None = None
    tool_choice: MessagesToolChoice | None = None


class MessagesRequest(CountRequest):
    """Body schema of `POST /v1/messages`: a request of Anthropic's Messages API."""

    max_tokens: Annotated[int, Field(ge=1)]
    stream: bool | None = None
    stop_sequences: list[Name] | None = None
    temperature: float | None = None


class ContentBlock(Body):
    """Schema in a Messages API reply: a block of the message's content."""

    type: Literal["text", "thinking", "tool_use"]


class MessageUsage(Body):
    """Schema in a Messages API reply: the token counts of the message."""

    input_tokens: Count
    output_tokens: Count
    cache_read_input_tokens: Count | None = None


class Message(Body):
    """Reply schema of `POST /v1/messages`: a message in Anthropic's format."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[ContentBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "refusal"]
    stop_sequence: str | None
    usage: MessageUsage


class Tokens(Body):
    """Reply schema of `POST /tokenize`: the tokens of a text or a conversation."""

    count: Count
    max_model_len: Count
    tokens: list[Count]


class Detokenized(Body):
    """Reply schema of `POST /detokenize`: the text of tokens."""

    prompt: str


class TokenizerInfo(ForwardedBody):
    """Reply schema of `GET /tokenizer_info`: settings of a model's tokenizer."""

    bos_token: str | None = None
    eos_token: str | None = None
    chat_template: str | None = None


class InputTokens(Body):
    """Reply schema of `POST /v1/responses/input_tokens`: the number of input tokens."""

    object: Literal["response.input_tokens"]
    input_tokens: Count


class TokenCount(Body):
    """Reply schema of `POST /v1/messages/count_tokens`: the number of tokens."""

    input_tokens: Count
