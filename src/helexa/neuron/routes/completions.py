"""`POST /v1/completions`."""

import asyncio

from starlette.requests import Request
from starlette.routing import Route

from helexa.core.wire.openai_completions import Completion, CompletionChoice, CompletionRequest
from helexa.core.wire.usage import Usage
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

    def chunk(self, text: str | None, finish_reason: str | None) -> Completion:
        """A chunk with a piece of text, or with the finish reason."""
        return Completion(
            id=self.id,
            object="text_completion",
            created=self.created,
            model=self.model,
            choices=[CompletionChoice(index=0, text=text or "", logprobs=None, finish_reason=finish_reason)],
        )

    def usage_chunk(self, usage: Usage) -> Completion:
        """The chunk that carries the usage and no choices."""
        return {**self.chunk(None, None), "choices": [], "usage": usage}

    def whole(self, text: str, finish_reason: str, usage: Usage) -> Completion:
        """The text completion."""
        return {**self.chunk(text, finish_reason), "usage": usage}


routes = [Route("/v1/completions", completions, methods=["POST"])]
