"""Tables of the native attention plan."""

from helexa.neuron.ops.batch import Capacity
from helexa.neuron.ops.native.attention import AttentionPlan
from helexa.neuron.tensors import Tensor


def test_layers_with_different_heads_get_separate_memory_for_partial_results() -> None:
    memory: dict[tuple[int, int], Tensor] = {}
    plan = AttentionPlan(Capacity(rows=8, sequences=2, pages_per_sequence=64), memory, group=2)
    few, many = plan.partials(4, 64), plan.partials(8, 256)
    assert few.data_ptr() != many.data_ptr()
    assert plan.partials(4, 64) is few, "captured graphs hold the address"
    assert {size: partials.shape[1:] for size, partials in memory.items()} == {
        (4, 64): (4, 66),
        (8, 256): (8, 258),
    }
