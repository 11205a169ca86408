"""What kernels become on cards that are not there: they fit, and threads keep in registers what they work on."""

import pytest

from neuron.ops.triton.compiling import CARDS, Compiled, compile_all
from neuron.ops.triton.launches import LAUNCHES

Found = dict[str, dict[str, list[Compiled]]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return compile_all(tmp_path_factory.mktemp("triton"))


@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("launch", LAUNCHES)
def test_it_fits_the_card_and_its_registers(found: Found, launch: str, card: str) -> None:
    kernels = found[launch][card]
    assert kernels, "nothing was launched"
    for kernel in kernels:
        assert kernel.shared <= CARDS[card].shared_memory, kernel.kernel
        assert (kernel.spilled, kernel.stack) == (0, 0), kernel.kernel


@pytest.mark.parametrize("card", CARDS)
def test_a_norm_reads_16_bytes_at_a_time(found: Found, card: str) -> None:
    (norm,) = found["rms_norm 8B"][card]
    assert norm.loads(128)
    assert not norm.loads(32)
