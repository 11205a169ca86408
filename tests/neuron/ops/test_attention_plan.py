"""Tables of the native attention."""

from helexa.neuron.ops.batch import Capacity
from helexa.neuron.ops.native.attention_plan import AttentionPlan


def test_layers_of_different_heads_get_room_for_their_own_partial_results() -> None:
    plan = AttentionPlan(Capacity(rows=8, sequences=2, pages_per_sequence=64), group=2)
    few, many = plan.partials(4, 64), plan.partials(8, 256)
    assert few.data_ptr() != many.data_ptr()
    assert plan.partials(4, 64) is few, "recorded steps keep the address"
    assert {size: room.shape[1:] for size, room in plan._partials.items()} == {(4, 64): (4, 66), (8, 256): (8, 258)}
