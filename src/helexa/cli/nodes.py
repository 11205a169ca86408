"""Reads the gateway's report about its nodes from `/api/nodes`."""

from pydantic import Field, TypeAdapter, ValidationError

from helexa.cli.failure import CommandError
from helexa.cli.gateway import Gateway
from helexa.core.fleet import Activation, DeviceHealth, Discovery, ModelInfo, ModelLoad, Record


class NodeReport(Record):
    """The gateway's report about one node.

    Attributes:
        models: models on the node.
        load: current load of each model.
        activation: progress of the models that the node loads at its start.
    """

    name: str
    endpoint: str = ""
    healthy: bool = False
    models: list[ModelInfo] = Field(default_factory=list[ModelInfo])
    load: list[ModelLoad] = Field(default_factory=list[ModelLoad])
    activation: Activation = Field(default_factory=Activation)
    devices: list[DeviceHealth] = Field(default_factory=list[DeviceHealth])
    discovery: Discovery | None = None

    def load_of(self, model: str) -> ModelLoad | None:
        """Return the current load (such as running requests) of `model` on this node, or None if unknown."""
        return next((load for load in self.load if load.id == model), None)


def node_reports(gateway: Gateway) -> list[NodeReport]:
    """Request and return the gateway's reports about all its nodes.

    Raises:
        CommandError: the gateway is unreachable, rejects the request, or is not a helexa gateway.
    """
    response = gateway.get("/api/nodes")
    try:
        return TypeAdapter(list[NodeReport]).validate_python(response["nodes"])
    except (KeyError, TypeError, ValidationError):
        raise CommandError(f"{gateway.url}/api/nodes did not answer with nodes; is this a helexa gateway?") from None
