"""Serve `POST /v1/completions`."""

import asyncio

from starlette.requests import Request
from starlette.routing import Route

from helexa.core.wire.openai_completions import CompletionRequest
from helexa.neuron.lifecycle.model import ServedModel
from helexa.neuron.requests.inference import run
from helexa.neuron.requests.output_constraint import completion_constraint
from helexa.neuron.routes.body import read_json
from helexa.neuron.routes.principal import principal_of
from helexa.neuron.routes.projectors.completion_projector import CompletionProjector, Echo
from helexa.neuron.routes.reply import RunResponse
from helexa.neuron.routes.usage import reports_usage


async def completions(request: Request) -> RunResponse:
    """Handle `POST /v1/completions`: generate continuations of prompts, which are texts or lists of token ids."""
    completion = CompletionRequest.parse(await read_json(request))
    model: ServedModel = request.app.state.registry.get(completion.model)
    completion.check_vocabulary(model.text.tokenizer.vocab_size)
    prompts = await asyncio.to_thread(_token_ids, model, completion)
    echo = await asyncio.to_thread(_echo, model, completion) if completion.echo else []
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
    """Return each answer's prompt, which the response repeats before the answer (request option `echo`)."""
    tokenizer = model.text.tokenizer
    echoes = [
        Echo(prompt, tokenizer.offsets(prompt))
        if isinstance(prompt, str)
        else Echo(tokenizer.decode(prompt), tokenizer.decoded_offsets(prompt))
        for prompt in completion.prompt
    ]
    return [echo for echo in echoes for _ in range(completion.n or 1)]


routes = [Route("/v1/completions", completions, methods=["POST"])]
