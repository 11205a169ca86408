"""The exchange through `torch.distributed`, with one thread per rank."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest
import torch
from torch import Tensor

from helexa.neuron.ops.distributed_exchange import Distributed
from helexa.neuron.ops.rank_group_and_shares import RankGroup, Shares
from helexa.neuron.ops.reference.reference_ops import ReferenceOps

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16]


def on_ranks(count: int, folder: Path, run: Callable[[int, Distributed], Tensor]) -> list[Tensor]:
    """Return the results of `run(rank, exchange)` on all ranks."""
    connected = Barrier(count, timeout=60)  # a rank that ends before the others are connected breaks their connections

    def rank(number: int) -> Tensor:
        exchange = Distributed(RankGroup(number, count), folder / "store", 30.0, CPU)
        connected.wait()
        return run(number, exchange)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(rank, range(count)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("total", [48, 80])  # even and uneven shares of three ranks
def test_gather_returns_the_columns_of_all_ranks_to_each_rank(total: int, dtype: torch.dtype, tmp_path: Path) -> None:
    whole = torch.randn(5, total).to(dtype)

    def run(rank: int, exchange: Distributed) -> Tensor:
        shares = Shares.split(total, 3, rank, 16)
        return exchange.gather(whole[:, shares.own.start : shares.own.stop], shares)

    for gathered in on_ranks(3, tmp_path, run):
        assert torch.equal(gathered, whole)


@pytest.mark.parametrize("rows", [1, 7, 64])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sum_over_ranks_adds_in_rank_order_and_rounds_once(rows: int, dtype: torch.dtype, tmp_path: Path) -> None:
    """The sum of a row does not depend on the number of rows, and is rounded once."""
    parts = [torch.randn(rows, 33).to(dtype) for _ in range(3)]

    def run(rank: int, exchange: Distributed) -> Tensor:
        ops = ReferenceOps(CPU, dtype)
        ops.ranks = RankGroup(rank, 3)
        ops.connect(exchange)
        return ops.sum_ranks(parts[rank])

    first, second, third = (part.float() for part in parts)
    for total in on_ranks(3, tmp_path, run):
        assert torch.equal(total, ((first + second) + third).to(dtype))


def test_gather_of_zero_rows_returns_although_no_other_rank_joins(tmp_path: Path) -> None:
    def run(rank: int, exchange: Distributed) -> Tensor:
        return exchange.gather(torch.zeros(0, 16), Shares.split(32, 2, rank)) if rank else torch.zeros(0, 32)

    assert [tuple(result.shape) for result in on_ranks(2, tmp_path, run)] == [(0, 32), (0, 32)]


def test_connection_of_ranks_fails_within_the_time_limit_if_one_is_missing(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError):
        Distributed(RankGroup(0, 2), tmp_path / "store", 0.5, CPU)
