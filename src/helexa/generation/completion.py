"""Results of a request: chunks of the response, and the completion."""

import json
from dataclasses import dataclass, field
from typing import Any, Literal

FinishReason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of one token.

    Attributes:
        token: the text of the token. If the token is only a part of a character, the text is the replacement character
            U+FFFD; see `bytes`.
        logprob: natural logarithm of the token's probability, or NaN if the server did not report it.
        bytes: the bytes of the token.
        top: the most likely tokens at this position, most likely first, if the request asked for them.
    """

    token: str
    logprob: float
    bytes: tuple[int, ...] = ()
    top: "tuple[TokenLogprob, ...]" = ()


@dataclass(frozen=True, slots=True)
class Delta:
    """A chunk of a completion: generated text.

    Attributes:
        text: the text. It is never empty in a stream. A target may send a chunk that has only log-probabilities.
        thought: whether the chunk is reasoning.
        logprobs: log-probabilities of the chunk's tokens, if the request asked for them.
    """

    text: str
    thought: bool = False
    logprobs: tuple[TokenLogprob, ...] = ()

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Token counts of a request.

    `prompt` includes `cached` tokens, and `completion` includes `reasoning` tokens.
    """

    prompt: int = 0
    cached: int = 0
    completion: int = 0
    reasoning: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Durations of a completion's request, in seconds.

    In a batch, "the call" is the start of this request.

    Attributes:
        load_s: time from the call until the model is loaded. Almost 0 if it was already loaded.
        queue_s: time that the request waits for other requests, after the model is loaded.
        prefill_s: time of the prompt's prefill. If a server does not report it, it includes the time in the queue.
        ttft_s: time from the call to the first token, including load, queue and prefill.
        decode_s: time from the first token to the last token.
        total_s: time from the call to the end of the response.
    """

    load_s: float = 0.0
    queue_s: float = 0.0
    prefill_s: float = 0.0
    ttft_s: float = 0.0
    decode_s: float = 0.0
    total_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call of the model.

    Attributes:
        id: id of the call, unique in the conversation.
        name: name of the tool.
        arguments: arguments of the call, as the model wrote them. Check them before you use them.
    """

    id: str
    name: str
    arguments: dict[str, Any]

    def reply(self, result: Any) -> dict[str, Any]:
        """Return the message that tells the model the result of this call.

        A result that is no string becomes JSON.
        """
        content = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
        return {"role": "tool", "tool_call_id": self.id, "content": content}


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A complete response of the model to a prompt.

    `str()` of a completion is its text.

    Attributes:
        text: generated text without reasoning.
        reasoning: reasoning text before `text`, or an empty string.
        finish_reason: `stop` if the response is complete, `length` if it reached its token limit, or `tool_calls` if
            it ended with tool calls.
        tool_calls: the tool calls of the response, in order.
        logprobs: log-probabilities of the tokens in `text`, if the request asked for them.
        usage: token counts.
        timings: durations.
        model: id of the model.
        seed: random seed. A request with the same seed and prompt reproduces the response.
        device, dtype: device and data type of the computation, or None if the server does not report them.
        parsed: parsed text if the request had a schema: an instance of the pydantic model, or plain JSON values. None
            if there was no schema, or if the response has tool calls.
        others: further completions for the same prompt, if the caller requested several; see `choices`.
    """

    text: str
    reasoning: str = ""
    finish_reason: FinishReason = "stop"
    tool_calls: tuple[ToolCall, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    usage: Usage = field(default_factory=Usage)
    timings: Timings = field(default_factory=Timings)
    model: str = ""
    seed: int = 0
    device: str | None = None
    dtype: str | None = None
    parsed: Any = None
    others: "tuple[Completion, ...]" = ()

    def __str__(self) -> str:
        return self.text

    @property
    def choices(self) -> "tuple[Completion, ...]":
        """All requested completions for the prompt, beginning with this one."""
        return (self, *self.others)

    @property
    def message(self) -> dict[str, Any]:
        """This response without its reasoning, as a message in OpenAI's chat format."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.tool_calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
                }
                for call in self.tool_calls
            ]
        return message

    @property
    def tok_s(self) -> float:
        """Tokens per second during decode, or 0 if unknown."""
        decoded = self.usage.completion - 1
        return decoded / self.timings.decode_s if decoded > 0 and self.timings.decode_s > 0 else 0.0
