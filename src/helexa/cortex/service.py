"""What a request goes through between being read and being answered: permission, budget, a node."""

import logging

from helexa.cortex.decision import decide
from helexa.cortex.exchange import Exchange
from helexa.cortex.gateway import Gateway
from helexa.cortex.placement import Cold
from helexa.cortex.proxy import NoAnswer
from helexa.cortex.question import Question
from helexa.cortex.reply import Reply
from helexa.cortex.router import Warm, warm

log = logging.getLogger(__name__)


async def serve(gateway: Gateway, question: Question, reply: Reply, exchange: Exchange) -> None:
    """Answer one question.

    Raises:
        ApiError: refused or failed; the caller ends the reply with it.
    """
    exchange.name = question.model
    model = gateway.catalogue.resolve(question.model)
    if gateway.catalogue.profile(model) is not None or gateway.fleet.view().knows(model):
        exchange.model = model
    target = await _target(gateway, question, reply, exchange)
    other = warm(gateway.fleet.view(), model, avoid={target.node})
    try:
        await gateway.proxy.ask(target, question, reply, exchange, None, last=other is None)
        return
    except NoAnswer as error:
        log.warning("%s gave no answer for %s: %s", target.node, model, error)
        refusal = error
    if other is None:
        raise refusal.refusal from refusal
    try:
        await gateway.proxy.ask(other, question, reply, exchange, None, last=True)
    except NoAnswer as error:
        log.warning("%s gave no answer for %s: %s", other.node, model, error)
        raise error.refusal from error


async def _target(gateway: Gateway, question: Question, reply: Reply, exchange: Exchange) -> Warm:
    decision = decide(gateway.fleet.view(), gateway.catalogue, question.model)
    exchange.node = decision.node
    if isinstance(decision, Cold):
        return await gateway.proxy.wait(gateway.loader.load(decision), question.stream, reply)
    return decision
