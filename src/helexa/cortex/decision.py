"""What becomes of a request for a model: a warm node answers it, or the model is loaded first."""

import random

from helexa.core.catalogue import Catalogue
from helexa.cortex.fleet import FleetView
from helexa.cortex.placement import Cold, cold
from helexa.cortex.router import Choose, Warm, warm

Decision = Warm | Cold


def decide(view: FleetView, catalogue: Catalogue, name: str, choose: Choose = random.choice) -> Decision:
    """Where a request for `name` (a model id or an alias) goes. `choose` breaks ties.

    Raises:
        ApiError: nobody can serve it now (503, with Retry-After when that may change) or ever heard of it (404).
    """
    model = catalogue.resolve(name)
    return warm(view, model, choose=choose) or cold(view, catalogue, model)
