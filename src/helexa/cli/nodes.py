"""What the gateway knows of its nodes, as `/api/nodes` tells it."""

from pydantic import Field, TypeAdapter, ValidationError

from helexa.cli.failure import CommandError
from helexa.cli.gateway import Gateway
from helexa.core.fleet import Activation, DeviceHealth, Discovery, ModelInfo, ModelLoad, Record


class NodeReport(Record):
    """One node: what it holds, how busy that is, and what it is loading."""

    name: str
    endpoint: str = ""
    healthy: bool = False
    models: list[ModelInfo] = Field(default_factory=list[ModelInfo])
    load: list[ModelLoad] = Field(default_factory=list[ModelLoad])
    activation: Activation = Field(default_factory=Activation)
    devices: list[DeviceHealth] = Field(default_factory=list[DeviceHealth])
    discovery: Discovery | None = None

    def load_of(self, model: str) -> ModelLoad | None:
        """How busy `model` is here, None when the node did not say."""
        return next((load for load in self.load if load.id == model), None)


def node_reports(gateway: Gateway) -> list[NodeReport]:
    """Every node of the fleet.

    Raises:
        CommandError: the gateway is unreachable, refuses, or is no helexa gateway.
    """
    reply = gateway.get("/api/nodes")
    try:
        return TypeAdapter(list[NodeReport]).validate_python(reply["nodes"])
    except (KeyError, TypeError, ValidationError):
        raise CommandError(f"{gateway.url}/api/nodes did not answer with nodes; is this a helexa gateway?") from None
