"""The choice of a model's device from the free memory of each device."""

import pytest

from helexa.neuron.hardware.device_choice import Gpu, choose_device

GIB = 1 << 30


def gpus(*free):
    return [Gpu(f"cuda:{index}", int(gib * GIB)) for index, gib in enumerate(free)]


@pytest.mark.parametrize(
    ("model_gib", "free_gib", "mps", "device"),
    [
        (1, (8, 24), False, "cuda:1"),  # the most free memory
        (1, (24, 8), False, "cuda:0"),
        (1, (8, 8), False, "cuda:0"),
        (30, (8, 24), False, "cpu"),  # fits on no device
        (30, (8, 24), True, "mps"),
        (20, (24,), False, "cpu"),  # the weights fit, but not with the buffers of a step
        (19, (24,), False, "cuda:0"),
        (1, (), True, "mps"),
        (1, (), False, "cpu"),
        (0, (1,), False, "cuda:0"),
    ],
)
def test_device_with_the_most_free_memory_is_chosen_if_the_model_fits(model_gib, free_gib, mps, device):
    assert choose_device(model_gib * GIB, gpus(*free_gib), mps=mps).device == device


def test_device_choice_lists_the_reasons_against_skipped_devices():
    choice = choose_device(30 * GIB, gpus(8, 24), skipped=["cuda:7 is lost"])
    assert str(choice) == (
        "cpu: no GPU can be used; cuda:7 is lost; cuda:1 has 24.0 GB free, the model needs 36.5 GB; "
        "cuda:0 has 8.00 GB free, the model needs 36.5 GB"
    )
