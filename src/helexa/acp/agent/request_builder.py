"""Builds the requests to the model and shortens the conversation to fit into the model's context."""

import json
from collections.abc import Sequence

from helexa.acp.agent.answer import AnswerCollector
from helexa.acp.agent.prompt import system_prompt
from helexa.acp.agent.turn import Turn
from helexa.acp.agent.view import fit_messages, text_tokens, tokens, visible, without_images
from helexa.acp.history import Message
from helexa.acp.providers.provider import ModelCard, ModelRequest, Provider, ProviderError, ToolSpec, Usage

MAX_TOKENS = 8192
"""Default maximum of response tokens. Smaller limits often end a response in the middle of a file."""

MARGIN = 512
"""Tokens reserved for chat template tokens, which the estimate does not count."""

MIN_CONTEXT = 1024
"""Smaller context sizes in error messages are ignored as implausible."""

_SHRINK = 0.6  # next size / rejected size, if the endpoint does not report its limit


class RequestBuilder:
    """Builds the requests to the model while the agent works on one prompt.

    Each request is built anew, because the user's choices and the history may change between requests.

    Attributes:
        overflows: whether the last request is too long for the context even after old messages were shortened.
    """

    def __init__(self, turn: Turn, notes: str) -> None:
        self.overflows = False
        self._turn = turn
        self._notes = notes
        self._factor = 1.0  # tokens counted by the endpoint per estimated token
        self._estimate = 0.0  # estimated tokens of the last request
        self._max_request_tokens: int | None = None  # maximum request tokens if the context size is unknown
        self._context: int | None = None
        self._max_tokens = MAX_TOKENS

    def request(self, provider: Provider) -> ModelRequest:
        """Return the next request to the model, with the conversation shortened to fit into the context.

        Raises:
            ProviderError: the configured system prompt cannot be read.
        """
        turn, choices = self._turn, self._turn.choices
        card = turn.models.card(choices.model)
        tools = [ToolSpec(tool.name, tool.description, tool.schema) for tool in turn.toolbox.tools(choices.mode)]
        try:
            system = system_prompt(turn.settings, turn.context, choices.mode, self._notes)
        except (OSError, UnicodeDecodeError) as error:
            path = turn.settings.system_prompt_path
            raise ProviderError("invalid", f"The system prompt {path} cannot be read: {error}") from error
        self._context = min(filter(None, (card.context, self._max_request_tokens)), default=None)
        self._max_tokens = _max_tokens(provider, card, self._context)
        messages: Sequence[Message] = visible(turn.conversation.messages)
        if card.images is False:
            messages = without_images(messages)
        fixed_tokens = text_tokens(system) + sum(
            text_tokens(tool.description + json.dumps(tool.schema)) for tool in tools
        )
        self._estimate = fixed_tokens + tokens(messages)
        if self._context is not None:
            available_tokens = (self._context - self._max_tokens - MARGIN) / self._factor
            messages = fit_messages(messages, available_tokens - fixed_tokens)
            self._estimate = fixed_tokens + tokens(messages)
            self.overflows = self._estimate > available_tokens
        return ModelRequest(
            model=choices.model.model,
            system=system,
            messages=messages,
            tools=tools,
            max_tokens=self._max_tokens,
            thought_level=choices.thought_level,
            temperature=choices.temperature,
        )

    def check(self) -> None:
        """Check that the last request fits into the context, because some endpoints truncate long requests silently.

        Raises:
            ProviderError: the last request has more tokens than the context.
        """
        size = round(self._estimate * self._factor)
        if self._context is not None and size > self._context:
            model = self._turn.choices.model
            raise ProviderError(
                "context_limit",
                f"The request has about {size} tokens, but the context of {model} has {self._context}: choose a model "
                "with a larger context, or clear the conversation with /clear",
            )

    def learn(self, error: ProviderError) -> None:
        """Lower the size limit of later requests, because the endpoint rejected the last request as too long.

        Args:
            error: the endpoint's error, which may contain the context size.
        """
        limit = error.context_limit
        if limit is not None and limit >= MIN_CONTEXT:
            self._turn.models.learn_context(self._turn.choices.model, limit)
            self._factor = max(self._factor, (limit - self._max_tokens) / max(self._estimate, 1.0))
        else:
            self._max_request_tokens = int(self._estimate * self._factor * _SHRINK) + self._max_tokens

    def calibrate(self, usage: Usage | None) -> None:
        """Correct later token estimates with the endpoint's token count of the last request.

        Args:
            usage: the endpoint's token counts, or None if the endpoint reported none.
        """
        if usage is not None and usage.input:
            self._factor = min(max(usage.input / max(self._estimate, 1.0), 0.5), 3.0)

    def usage(self, answer: AnswerCollector) -> Usage:
        """Return the token counts of a response. If the endpoint reported none, the counts are estimated."""
        return answer.usage or Usage(round(self._estimate * self._factor), round(text_tokens(answer.text)))


def _max_tokens(provider: Provider, card: ModelCard, context: int | None) -> int:
    """Return the maximum number of response tokens for a request.

    A configured limit is reduced to at most half of `context`. The default limit is reduced to at most a quarter.
    """
    configured = provider.endpoint.max_tokens
    max_tokens = min(filter(None, (configured or MAX_TOKENS, card.max_output)))
    if context is None:
        return max_tokens
    return max(1, min(max_tokens, context // (2 if configured else 4)))
