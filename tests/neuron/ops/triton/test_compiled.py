"""What kernels become on cards that are not there: they fit, and threads keep in registers what they work on."""

import re

import pytest

from neuron.ops.triton.compiling import CARDS, Compiled, compile_all
from neuron.ops.triton.launches import LAUNCHES

Found = dict[str, dict[str, list[Compiled]]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return compile_all(tmp_path_factory.mktemp("triton"))


@pytest.mark.parametrize(("launch", "card"), [(name, card) for name in LAUNCHES for card in LAUNCHES[name].cards])
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
    assert not norm.loads(64)
    assert not norm.loads(32)


@pytest.mark.parametrize("launch", ["W4 row 8B", "W6 row 27B", "W8 row, head of Gemma 3"])
def test_a_row_reads_codes_16_bytes_at_a_time_and_shares_nothing_on_the_way(found: Found, launch: str) -> None:
    for kernels in found[launch].values():
        (product,) = kernels
        assert product.loads(128) >= 4  # one for each row of the matrix
        assert product.ptx.count("bar.sync") == product.ptx.count("bar.sync", product.ptx.rindex("bra"))
        assert product.registers <= 168  # so that three programs run on a processor at a time


@pytest.mark.parametrize("launch", ["W4 rows 8B", "W4 more rows 8B", "W4 many rows 8B", "experts 30B-A3B, rows"])
def test_rows_go_through_tensor_cores(found: Found, launch: str) -> None:
    for card, kernels in found[launch].items():
        products = [kernel.ptx for kernel in kernels if kernel.kernel == "_multiply"]
        assert all("mma" in ptx for ptx in products)
        assert bool(products) == (card != "sm_75")  # where Triton has none, cuBLAS does it


@pytest.mark.parametrize("card", ["sm_86", "sm_90"])
def test_attention_copies_16_bytes_ahead_and_multiplies_on_tensor_cores(found: Found, card: str) -> None:
    short, _, long = found["attention 8B"][card]
    for kernel in (short, long):
        assert kernel.loads(128)
        assert not kernel.loads(64)
        assert not kernel.loads(32)
        waits = [int(left) for left in re.findall(r"cp\.async\.wait_group\s+(?:0x)?(\d+)", kernel.ptx)]
        assert max(waits) >= 2, "keys and values of a later step are not on their way"
    assert "mma.sync" in short.ptx
    assert ("wgmma" if card == "sm_90" else "mma.sync") in long.ptx


def test_a_larger_cache_needs_no_other_kernels(found: Found) -> None:
    (kernels,) = found["caches of any size"].values()
    assert len(kernels) == 4
    assert kernels[:2] == kernels[2:]


def test_states_are_read_16_bytes_at_a_time_and_prompts_multiplied_on_tensor_cores(found: Found) -> None:
    for (rows,) in found["delta_rule 27B"].values():
        assert rows.loads(128) >= 16  # all that a thread holds of a state
    for kernels in found["delta_rule 27B prompts"].values():
        chunks = {kernel.kernel: kernel.ptx for kernel in kernels}
        assert all("mma" in chunks[name] for name in ("_solve_chunks", "_carry_states"))


def test_logits_are_read_16_bytes_at_a_time(found: Found) -> None:
    for blocks, token in found["choose"].values():
        assert blocks.loads(128)
        assert token.loads(128)
