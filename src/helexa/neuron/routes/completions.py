"""`POST /v1/completions`."""

import asyncio
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.routing import Route

from helexa.core.wire.openai_completions import Completion, CompletionChoice, CompletionRequest
from helexa.core.wire.usage import Usage
from helexa.neuron.events import Finished, OutputEvent, Started, TextDelta
from helexa.neuron.inference import run
from helexa.neuron.model import ServedModel
from helexa.neuron.routes.body import read_json
from helexa.neuron.routes.principal import principal_of
from helexa.neuron.routes.projector import OpenAIProjector
from helexa.neuron.routes.reply import Reply


async def completions(request: Request) -> Reply:
    """Continue a text, or a list of token ids."""
    completion = CompletionRequest.parse(await read_json(request))
    model: ServedModel = request.app.state.registry.get(completion.model)
    prompt = completion.prompt
    if isinstance(prompt, str):
        prompt = await asyncio.to_thread(model.text.tokenizer.encode, prompt, add_special=True)
    events = run(model, prompt, completion, principal=principal_of(request))
    return Reply(events, CompletionProjector(model.id), stream=bool(completion.stream))


class CompletionProjector(OpenAIProjector):
    """Renders a run as a text completion, or as its chunks."""

    id_prefix = "cmpl"

    def chunk(self, choice: int, event: Started | OutputEvent | Finished) -> Completion | None:
        """The chunk that says so of a continuation."""
        match event:
            case TextDelta(text):
                return self._completion([_choice(choice, text, None)])
            case Finished():
                return self._completion([_choice(choice, "", event.reason)])
            case _:
                return None

    def usage_chunk(self, usage: Usage) -> Completion:
        """The chunk that carries the usage and no choices."""
        return {**self._completion([]), "usage": usage}

    def choice(self, index: int, events: Sequence[OutputEvent], end: Finished) -> CompletionChoice:
        """A whole continuation."""
        return _choice(index, "".join([event.text for event in events if isinstance(event, TextDelta)]), end.reason)

    def whole(self, choices: Sequence[Any], usage: Usage) -> Completion:
        """The text completion."""
        return {**self._completion(list(choices)), "usage": usage}

    def _completion(self, choices: list[CompletionChoice]) -> Completion:
        return Completion(id=self.id, object="text_completion", created=self.created, model=self.model, choices=choices)


def _choice(index: int, text: str, finish_reason: str | None) -> CompletionChoice:
    return CompletionChoice(index=index, text=text, logprobs=None, finish_reason=finish_reason)


routes = [Route("/v1/completions", completions, methods=["POST"])]
