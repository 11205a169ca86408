"""Chat requests of private engines that need no validation by pydantic.

These requests contain only texts and numbers. Importing pydantic and the pydantic models in `core.wire` would take a
third of the CPU time of a program that starts a private engine.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from helexa.core.sampling import BOUNDS, NumericSampling
from helexa.core.wire import BILLING_LINE

_SAMPLING = frozenset(field.name for field in fields(NumericSampling))
_INTEGERS = frozenset({"max_tokens", "top_k", "seed"})
_ROLES = frozenset({"system", "developer", "user", "assistant"})
_MESSAGE = frozenset({"role", "content"})


@dataclass(frozen=True, slots=True)
class TextMessage:
    """A message whose content is a text; see `ChatMessage`."""

    role: str
    content: str
    has_image: ClassVar[bool] = False

    def for_template(self) -> dict[str, Any]:
        """Return the message as the input of a chat template."""
        return {"role": self.role, "content": self.content}


@dataclass(frozen=True, kw_only=True)
class TextChat(NumericSampling):
    """A `ChatRequest` with only text messages and sampling options.

    All options of `ChatRequest` that are no field of this class have their defaults.
    """

    messages: tuple[TextMessage, ...]
    stream: bool = False
    enable_thinking: bool | None = None

    n = 1
    stop = None
    shape = None
    logit_bias = None
    ignore_eos = None
    alternatives = None
    scores_prompt = False
    must_call = False
    forced_tool = None
    parallel_tool_calls = None
    max_reasoning_tokens = None

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> "TextChat | None":
        """Return the request with the fields `body`, or None.

        The result is None if this class lacks a field of the request, if `body` lacks `model`, `messages` or `stream`,
        if a value is invalid, or if a text begins with the billing line of Claude Code. The caller must then use
        `ChatRequest`, which reports invalid values and removes the billing line.
        """
        sampling: dict[str, float] = {}
        for name, value in body.items():
            if name in _SAMPLING and value is not None:
                kinds = (int,) if name in _INTEGERS else (int, float)
                bounds = BOUNDS.get(name)
                if type(value) not in kinds or (bounds is not None and bounds.nearest(value) != value):
                    return None
                sampling[name] = value if name in _INTEGERS else float(value)
        others = {name: value for name, value in body.items() if name not in _SAMPLING}
        match others:
            case {"model": str(), "messages": [_, *_] as messages, "stream": bool(stream), **rest}:
                thinks = rest.pop("enable_thinking", None)
                if rest or not isinstance(thinks, bool | None) or not all(map(_is_text, messages)):
                    return None
                turns = tuple(TextMessage(message["role"], message["content"]) for message in messages)
                return cls(messages=turns, stream=stream, enable_thinking=thinks, **sampling)  # type: ignore[arg-type]
        return None

    @property
    def offered_tools(self) -> list[dict[str, Any]]:
        """The tools in the format that chat templates expect: none."""
        return []

    @property
    def template_variables(self) -> dict[str, Any]:
        """Variables for the chat template: none."""
        return {}

    @property
    def output_limit(self) -> int | None:
        """Maximum number of tokens of each completion, or None."""
        return self.max_tokens

    def thinks(self, default: bool | None) -> bool | None:
        """Return whether the request enables reasoning; `default` if it does not say."""
        return default if self.enable_thinking is None else self.enable_thinking

    def check_vocabulary(self, vocab_size: int) -> None:
        """Accept the request, which has no token ids."""

    def limited_by_logprobs(self, prompt: int, limit: int) -> int:
        """Return `limit`, because the request asks for no log-probabilities."""
        return limit


def _is_text(message: Any) -> bool:
    """Return whether a message has a known role, a plain text and no other field."""
    return (
        isinstance(message, Mapping)
        and message.keys() == _MESSAGE
        and message["role"] in _ROLES
        and isinstance(message["content"], str)
        and not message["content"].startswith(BILLING_LINE)
    )
