"""What becomes of a request for a model: a warm node answers it, or the model is loaded first."""

import random

from helexa.core.catalogue import Catalogue
from helexa.cortex.fleet import FleetView
from helexa.cortex.placement import Cold, cold
from helexa.cortex.router import Choose, Warm, failing, route

Decision = Warm | Cold


def decide(view: FleetView, catalogue: Catalogue, name: str, choose: Choose = random.choice) -> Decision:
    """Where a request for `name` (a model id or an alias) goes. `choose` breaks ties.

    Raises:
        ApiError: nobody can serve it now (503, with Retry-After when that may change) or ever heard of it (404).
    """
    model = catalogue.resolve(name)
    target = route(view, model, choose=choose)
    if target is not None:
        return target
    refusal = failing(view, model)
    if refusal is not None:
        raise refusal
    return cold(view, catalogue, model)
