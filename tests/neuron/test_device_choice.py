"""Devices and dtypes, chosen from facts."""

import pytest

from helexa.neuron.device_choice import Gpu, accelerator_dtype, choose_device

GIB = 1 << 30


def gpus(*free):
    return [Gpu(f"cuda:{index}", int(gib * GIB)) for index, gib in enumerate(free)]


@pytest.mark.parametrize(
    ("model_gib", "free_gib", "mps", "device"),
    [
        (1, (8, 24), False, "cuda:1"),  # the most free memory
        (1, (24, 8), False, "cuda:0"),
        (1, (8, 8), False, "cuda:0"),
        (30, (8, 24), False, "cpu"),  # no device has room
        (30, (8, 24), True, "mps"),
        (20, (24,), False, "cpu"),  # what a step needs has no room beside the weights
        (19, (24,), False, "cuda:0"),
        (1, (), True, "mps"),
        (1, (), False, "cpu"),
        (0, (1,), False, "cuda:0"),
    ],
)
def test_the_device_with_the_most_free_memory_that_holds_the_model(model_gib, free_gib, mps, device):
    assert choose_device(model_gib * GIB, gpus(*free_gib), mps=mps).device == device


def test_the_choice_says_why_others_were_not():
    choice = choose_device(30 * GIB, gpus(8, 24), skipped=["cuda:7 is lost"])
    assert str(choice) == (
        "cpu: the processor; cuda:7 is lost; cuda:1 has 24576 MiB free, the model needs 37376; "
        "cuda:0 has 8192 MiB free, the model needs 37376"
    )


@pytest.mark.parametrize(
    ("kind", "capability", "half", "dtype"),
    [
        ("cuda", (9, 0), True, "bfloat16"),
        ("cuda", (8, 0), False, "bfloat16"),
        ("cuda", (7, 5), True, "float16"),
        ("cuda", (7, 5), False, "float32"),
        ("cuda", (6, 1), True, "float16"),
        ("mps", None, True, "float16"),
        ("mps", None, False, "float32"),
    ],
)
def test_the_dtype_follows_from_what_the_device_can_do_and_the_model_bears(kind, capability, half, dtype):
    assert accelerator_dtype(kind, capability, half=half) == dtype
