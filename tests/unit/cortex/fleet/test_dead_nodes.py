"""The models of nodes that are down."""

from cortex.fake_node import FakeNode
from cortex.running_gateway import Cortex, eventually, running_cortex


async def state(cortex: Cortex, model: str) -> str:
    return (await cortex.get(f"/v1/models/{model}"))["state"]


async def test_model_of_a_dead_node_is_unreachable_unless_another_node_can_load_it() -> None:
    dead, other = FakeNode(name="n1").holds("Org/Only", "Org/Pinned", "Org/Both"), FakeNode(name="n2")
    async with (
        dead.serving(),
        other.serving(),
        running_cortex(dead, other, models=[{"id": "Org/Both"}, {"id": "Org/Pinned", "pinned_on": ["n1"]}]) as cortex,
    ):
        assert await state(cortex, "Org/Only") == "warm"
        dead.down = True
        await eventually(lambda: not cortex.gateway.fleet.node("n1").healthy)
        states = [await state(cortex, model) for model in ("Org/Only", "Org/Pinned", "Org/Both")]
        assert states == ["unreachable", "unreachable", "cold"]
