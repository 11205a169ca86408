"""Serve `POST /v1/completions`."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import orjson
from starlette.requests import Request
from starlette.routing import Route

from helexa.core.wire.openai_completions import Completion, CompletionChoice, CompletionLogprobs, CompletionRequest
from helexa.core.wire.usage_and_encoded_lists import Usage
from helexa.neuron.lifecycle.served_model_and_context_limit import ServedModel
from helexa.neuron.output_events import Finished, OutputEvent, PromptScores, Started, TextDelta, TokenLogprob
from helexa.neuron.requests.inference import run
from helexa.neuron.requests.output_constraint import completion_constraint
from helexa.neuron.routes.answer_formats import OpenAIProjector
from helexa.neuron.routes.replies_disconnects_and_errors import RunResponse, principal_of, read_json, reports_usage


class Echo(NamedTuple):
    """A prompt that the response repeats before an answer."""

    text: str
    # For each token of the prompt, the index in `text` of the first character that the token begins or continues. Used
    # only if the response has the log-probabilities of the prompt's tokens.
    offsets: Sequence[int]


async def completions(request: Request) -> RunResponse:
    """Handle `POST /v1/completions`: continue texts or lists of token ids."""
    completion = CompletionRequest.parse(await read_json(request))
    model: ServedModel = request.app.state.registry.get(completion.model)
    completion.check_vocabulary(model.text.tokenizer.vocab_size)
    model.expect_request()
    prompts = await model.text.run(_token_ids, model, completion)
    echo = await model.text.run(_echo, model, completion) if completion.echo else []
    constraint = await completion_constraint(model, completion)
    events = run(model, prompts, completion, constraint=constraint, principal=principal_of(request))
    client_usage = completion.includes_usage
    projector = CompletionProjector(
        model.id,
        choices=completion.answers,
        echo=echo,
        scored=completion.scores_prompt,
        include_usage=client_usage or reports_usage(request),
        null_usage=client_usage,
    )
    return RunResponse(events, projector, stream=bool(completion.stream))


def _token_ids(model: ServedModel, completion: CompletionRequest) -> list[list[int]]:
    encode = model.text.tokenizer.encode
    return [encode(prompt, add_special=True) if isinstance(prompt, str) else prompt for prompt in completion.prompt]


def _echo(model: ServedModel, completion: CompletionRequest) -> list[Echo]:
    """Return each answer's prompt, for the request option `echo`."""
    tokenizer = model.text.tokenizer
    echoes = [
        Echo(prompt, tokenizer.offsets(prompt))
        if isinstance(prompt, str)
        else Echo(tokenizer.decode(prompt), tokenizer.decoded_offsets(prompt))
        for prompt in completion.prompt
    ]
    return [echo for echo in echoes for _ in range(completion.n or 1)]


class CompletionProjector(OpenAIProjector):
    """Converts output events to a text completion, as one body or chunks.

    Args:
        echo: prompt to repeat before each answer, by index of the answer; empty to repeat no prompts.
        scored: whether to report the log-probabilities of the prompt's tokens before those of the answer's tokens.
        include_usage: whether the last chunk of a stream contains the token counts (`usage`) and no choices.
        null_usage: whether all other chunks have `"usage": null`.
    """

    id_prefix = "cmpl"

    def __init__(
        self,
        model: str,
        *,
        choices: int = 1,
        echo: Sequence[Echo] = (),
        scored: bool = False,
        include_usage: bool = False,
        null_usage: bool = False,
    ) -> None:
        super().__init__(model, choices=choices, include_usage=include_usage, null_usage=null_usage)
        self._echo = [prompt.text for prompt in echo] or [""] * choices
        self._prompt_offsets = [prompt.offsets for prompt in echo]
        self._scored = scored
        # by answer: whether the next reported token is the first token of the prompt
        self._first_unscored = [scored] * choices
        self._arrays = [_no_logprobs() for _ in range(choices)]

    def chunk(self, choice: int, event: Started | OutputEvent | Finished) -> Completion | None:
        """Return the stream chunk for an event of answer `choice`; None for no chunk."""
        match event:
            case Started() if self._echo[choice] and not self._scored:
                return self._completion([_choice(choice, self._echo[choice])])
            case PromptScores(tokens):
                arrays = _no_logprobs()
                self._add(choice, tokens, arrays)
                return self._completion([_choice(choice, self._echo[choice], arrays)])
            case TextDelta(text, logprobs):
                arrays = _no_logprobs()
                self._add(choice, logprobs, arrays)
                return self._completion([_choice(choice, text, arrays if logprobs else None)])
            case Finished():
                return self._completion([_choice(choice, "", finish_reason=event.reason)])
            case _:
                return None

    def usage_chunk(self, usage: Usage) -> Completion:
        """Return the last chunk, with the token counts `usage` and no choices."""
        return {**self._completion([]), "usage": usage}

    def keep_logprobs(self, choice: int, tokens: Sequence[TokenLogprob]) -> None:
        """Record log-probabilities of the next tokens of answer `choice` or its prompt."""
        self._add(choice, tokens, self._arrays[choice])

    def choice(self, index: int, events: Sequence[OutputEvent], end: Finished) -> CompletionChoice:
        """Return the complete answer `index`, an element of `choices` in the body."""
        text = "".join([self._echo[index], *(event.text for event in events if isinstance(event, TextDelta))])
        arrays = self._arrays[index]
        return _choice(index, text, arrays if arrays["tokens"] else None, end.reason)

    def complete_body(self, choices: Sequence[Any], usage: Usage) -> Completion:
        """Return the body with the answers `choices` and the token counts `usage`."""
        return {**self._completion(list(choices)), "usage": usage}

    def _add(self, choice: int, tokens: Sequence[TokenLogprob], arrays: CompletionLogprobs) -> None:
        of_prompt = self._first_unscored[choice]
        offsets = self._prompt_offsets[choice] if of_prompt else [len(self._echo[choice]) + t.offset for t in tokens]
        for token, offset in zip(tokens, offsets, strict=True):
            arrays["tokens"].append(token.token)
            if self._first_unscored[choice]:
                self._first_unscored[choice] = False
                arrays["token_logprobs"].append(None)
                arrays["top_logprobs"].append(None)
            else:
                # The keys of the dict are texts. Several tokens may have the same text, for example invalid parts of a
                # character. `reversed` keeps the log-probability of the most likely of these tokens.
                alike = [(name, logprob) for name, _, logprob in reversed(token.top)]
                top = {token.token: token.logprob, **dict(alike)}
                arrays["token_logprobs"].append(token.logprob)
                arrays["top_logprobs"].append(orjson.Fragment(orjson.dumps(top)))
            arrays["text_offset"].append(offset)

    def _completion(self, choices: list[CompletionChoice]) -> Completion:
        return Completion(id=self.id, object="text_completion", created=self.created, model=self.model, choices=choices)


def _no_logprobs() -> CompletionLogprobs:
    return CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])


def _choice(
    index: int, text: str, logprobs: CompletionLogprobs | None = None, finish_reason: str | None = None
) -> CompletionChoice:
    return CompletionChoice(index=index, text=text, logprobs=logprobs, finish_reason=finish_reason)


routes = [Route("/v1/completions", completions, methods=["POST"])]
