"""`POST /v1/completions`."""

import asyncio

from starlette.requests import Request
from starlette.routing import Route

from helexa.core.wire.openai_completions import CompletionRequest
from helexa.neuron.constraint import completion_constraint
from helexa.neuron.inference import run
from helexa.neuron.model import ServedModel
from helexa.neuron.routes.body import read_json
from helexa.neuron.routes.completion_projector import CompletionProjector
from helexa.neuron.routes.principal import principal_of
from helexa.neuron.routes.reply import Reply
from helexa.neuron.routes.usage import reports_usage


async def completions(request: Request) -> Reply:
    """Continue a text, or a list of token ids."""
    completion = CompletionRequest.parse(await read_json(request))
    model: ServedModel = request.app.state.registry.get(completion.model)
    prompt, echo, tokenizer = completion.prompt, "", model.text.tokenizer
    if isinstance(prompt, str):
        echo = prompt if completion.echo else ""
        prompt = await asyncio.to_thread(tokenizer.encode, prompt, add_special=True)
    elif completion.echo:
        completion.check_vocabulary(tokenizer.vocab_size)
        echo = await asyncio.to_thread(tokenizer.decode, prompt)
    constraint = await completion_constraint(model, completion)
    events = run(model, prompt, completion, constraint=constraint, principal=principal_of(request))
    asked = completion.includes_usage
    projector = CompletionProjector(
        model.id,
        choices=completion.n or 1,
        echo=echo,
        include_usage=asked or reports_usage(request),
        null_usage=asked,
    )
    return Reply(events, projector, stream=bool(completion.stream))


routes = [Route("/v1/completions", completions, methods=["POST"])]
