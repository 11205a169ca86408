"""Compiled kernels fit each GPU model, do not spill registers, and use wide loads and tensor cores."""

import re

import pytest

from neuron.ops.triton.compile_for_cards import CARDS, Compiled, compile_all
from neuron.ops.triton.launches import LAUNCHES

CompiledKernels = dict[str, dict[str, list[Compiled]]]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> CompiledKernels:
    return compile_all(tmp_path_factory.mktemp("triton"))


@pytest.mark.parametrize(("launch", "gpu"), [(name, gpu) for name in LAUNCHES for gpu in LAUNCHES[name].cards])
def test_compiled_kernel_fits_the_gpu_without_spilling_registers(
    compiled: CompiledKernels, launch: str, gpu: str
) -> None:
    kernels = compiled[launch][gpu]
    assert kernels, "nothing was launched"
    for kernel in kernels:
        assert kernel.shared <= CARDS[gpu].shared_memory, kernel.kernel
        assert (kernel.spilled, kernel.stack) == (0, 0), kernel.kernel


@pytest.mark.parametrize("gpu", CARDS)
def test_compiled_norm_kernel_loads_16_bytes_per_instruction(compiled: CompiledKernels, gpu: str) -> None:
    (norm,) = compiled["rms_norm 8B"][gpu]
    assert norm.loads(128)
    assert not norm.loads(64)
    assert not norm.loads(32)


@pytest.mark.parametrize("launch", ["W4 row 8B", "W6 row 27B", "W8 row, head of Gemma 3"])
def test_compiled_single_row_product_loads_16_bytes_and_synchronizes_only_at_the_end(
    compiled: CompiledKernels, launch: str
) -> None:
    for kernels in compiled[launch].values():
        (product,) = kernels
        assert product.loads(128) >= 4  # one for each row of the matrix
        assert product.ptx.count("bar.sync") == product.ptx.count("bar.sync", product.ptx.rindex("bra"))
        assert product.registers <= 168  # so that three programs fit on a multiprocessor


@pytest.mark.parametrize("launch", ["W4 rows 8B", "W4 more rows 8B", "W4 many rows 8B", "experts 30B-A3B, rows"])
def test_compiled_products_of_many_rows_use_tensor_cores(compiled: CompiledKernels, launch: str) -> None:
    for gpu, kernels in compiled[launch].items():
        products = [kernel.ptx for kernel in kernels if kernel.kernel == "_multiply"]
        assert all("mma" in ptx for ptx in products)
        assert bool(products) == (gpu != "sm_75")  # Triton has no tensor core products for sm_75; cuBLAS is used


@pytest.mark.parametrize("gpu", ["sm_86", "sm_90"])
def test_compiled_attention_prefetches_16_bytes_and_uses_tensor_cores(compiled: CompiledKernels, gpu: str) -> None:
    short, _, long = compiled["attention 8B"][gpu]
    for kernel in (short, long):
        assert kernel.loads(128)
        assert not kernel.loads(64)
        assert not kernel.loads(32)
        waits = [int(pending) for pending in re.findall(r"cp\.async\.wait_group\s+(?:0x)?(\d+)", kernel.ptx)]
        assert max(waits) >= 2, "keys and values are not prefetched"
    assert "mma.sync" in short.ptx
    assert ("wgmma" if gpu == "sm_90" else "mma.sync") in long.ptx


@pytest.mark.parametrize("launch", ["vision tower 4B", "vision tower 27B"])
def test_compiled_frame_attention_loads_16_bytes_and_uses_tensor_cores(compiled: CompiledKernels, launch: str) -> None:
    for card, (_, attention) in compiled[launch].items():
        assert attention.loads(128)
        assert ("wgmma" if card == "sm_90" else "mma.sync") in attention.ptx


def test_kv_caches_of_any_size_use_the_same_compiled_kernels(compiled: CompiledKernels) -> None:
    (kernels,) = compiled["caches of any size"].values()
    assert len(kernels) == 4
    assert kernels[:2] == kernels[2:]


def test_compiled_delta_rule_loads_16_bytes_and_uses_tensor_cores_for_prompts(compiled: CompiledKernels) -> None:
    for (rows,) in compiled["delta_rule 27B"].values():
        assert rows.loads(128) >= 16  # all that a thread holds of a state
    for kernels in compiled["delta_rule 27B prompts"].values():
        chunks = {kernel.kernel: kernel.ptx for kernel in kernels}
        assert all("mma" in chunks[name] for name in ("_solve_chunks", "_carry_states"))


def test_compiled_sampling_kernel_loads_16_bytes_per_instruction(compiled: CompiledKernels) -> None:
    for blocks, token in compiled["choose"].values():
        assert blocks.loads(128)
        assert token.loads(128)
