"""The division of decoder layers among hosts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helexa.core.errors import HelexaError
from helexa.neuron.engine.remote_stages import divide_layers

GIB = 1 << 30


def test_hosts_with_equal_memory_get_equally_many_layers() -> None:
    assert divide_layers([10] * 30, 0, [GIB, GIB, GIB]) == [range(10), range(10, 20), range(20, 30)]


def test_memory_of_embedding_and_output_head_counts_for_host_0() -> None:
    assert divide_layers([10] * 30, 100, [GIB, GIB]) == [range(10), range(10, 30)]


def test_host_with_more_memory_gets_more_layers() -> None:
    assert divide_layers([10] * 30, 0, [GIB, 2 * GIB]) == [range(10), range(10, 30)]


def test_each_host_gets_at_least_one_layer_even_without_free_memory() -> None:
    assert divide_layers([10] * 3, 0, [GIB, 0, 0]) == [range(1), range(1, 2), range(2, 3)]


def test_more_hosts_than_layers_is_an_error() -> None:
    with pytest.raises(HelexaError, match="2 layers cannot be divided among 3 hosts"):
        divide_layers([10, 10], 0, [GIB] * 3)


@given(
    layers=st.lists(st.integers(1, 100), min_size=4, max_size=24),
    first=st.integers(0, 200),
    free=st.lists(st.integers(1, 1000), min_size=1, max_size=4),
)
def test_no_move_of_one_layer_boundary_reduces_the_load_of_the_fullest_host(
    layers: list[int], first: int, free: list[int]
) -> None:
    ranges = divide_layers(layers, first, free)
    assert [layer for part in ranges for layer in part] == list(range(len(layers)))
    assert all(ranges)

    def fullest(parts: list[range]) -> float:
        sizes = [sum(layers[layer] for layer in part) + (first if host == 0 else 0) for host, part in enumerate(parts)]
        return max(size / space for size, space in zip(sizes, free, strict=True))

    least = fullest(ranges)
    for host in range(len(ranges) - 1):
        for shift in (-1, 1):
            bound = ranges[host].stop + shift
            moved = [*ranges]
            moved[host], moved[host + 1] = range(ranges[host].start, bound), range(bound, ranges[host + 1].stop)
            if all(moved):
                assert fullest(moved) >= least
