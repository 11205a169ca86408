"""The loader decides for each matrix whether the ranks add partial results, and reads the parts accordingly."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from helexa.core.errors import ModelFileError
from helexa.neuron.layers.loader import Loader
from helexa.neuron.layers.vision_tower_loader import Blocks, TowerLoader
from helexa.neuron.ops.linear_and_norm_operators import LinearOp
from helexa.neuron.ops.rank_group_and_shares import RankGroup, Shares
from helexa.neuron.ops.reference.reference_ops import ReferenceOps
from helexa.neuron.weights.model_file import WHOLE, Part
from helexa.neuron.weights.quantization_formats import QuantPolicy
from helexa.neuron.weights.safetensors_checkpoint import SafetensorsCheckpoint

NAME = "model.layers.3.mlp.down_proj"


@dataclass
class Tensors:
    """A checkpoint in memory, whose matrices have quantization blocks of `block` columns."""

    tensors: dict[str, Tensor]
    block: int = 1
    total_bytes: int = 0

    def names(self) -> list[str]:
        return list(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def column_block(self, name: str) -> int:
        return self.block

    def read(self, name: str, index: int | None = None, part: Part = WHOLE) -> Tensor:
        tensor = self.tensors[name]
        tensor = tensor if part.rows is None else tensor[part.rows]
        return tensor if part.columns is None else tensor[:, part.columns]


class Recorder(ReferenceOps):
    """Kernels of one rank without other ranks. The results of exchanges are recorded instead of exchanged."""

    def __init__(self, rank: int, ranks: int, sums: bool) -> None:
        super().__init__(torch.device("cpu"), torch.float32)
        self.ranks = RankGroup(rank, ranks, sums)
        self.exchanges: list[str] = []

    def gather(self, x: Tensor, shares: Shares) -> Tensor:
        self.exchanges.append("gather")
        out = torch.zeros(x.shape[0], shares.total)
        out[:, shares.own.start : shares.own.stop] = x
        return out

    def sum_ranks(self, x: Tensor) -> Tensor:
        self.exchanges.append("sum")
        return x


def loader_of(
    rank: int, ranks: int, inputs: int, *, block: int = 1, sums: bool = True, quant: str = "", bias: bool = False
) -> tuple[Loader, Tensors, Recorder]:
    torch.manual_seed(4)
    tensors = {f"{NAME}.weight": torch.randn(64, inputs)}
    if bias:
        tensors[f"{NAME}.bias"] = torch.randn(64)
    checkpoint, ops = Tensors(tensors, block), Recorder(rank, ranks, sums)
    policy = QuantPolicy(quant, 8) if quant else None
    return Loader(checkpoint, ops, lambda done: None, policy=policy), checkpoint, ops  # type: ignore[arg-type]


def exchanges_of(loader: Loader, ops: Recorder, shares: Shares) -> list[str]:
    product: LinearOp = loader.row_parallel_linear(NAME, 64, shares)
    product(torch.randn(2, len(shares.own)))
    return ops.exchanges


@pytest.mark.parametrize("ranks", [2, 3])
def test_partial_results_of_the_ranks_add_up_to_the_result_of_one_rank(ranks: int) -> None:
    x, total = torch.randn(3, 96), torch.zeros(3, 64)
    for rank in range(ranks):
        loader, checkpoint, ops = loader_of(rank, ranks, 96, bias=True)
        shares = loader.input_shares(f"{NAME}.weight", 96)
        total += loader.row_parallel_linear(NAME, 64, shares)(x[:, shares.own.start : shares.own.stop])
        assert ops.exchanges == ["sum"]
    expected = x @ checkpoint.tensors[f"{NAME}.weight"].T + checkpoint.tensors[f"{NAME}.bias"]
    torch.testing.assert_close(total, expected, rtol=0, atol=1e-5)


def test_row_parallel_linear_applies_the_gate_to_the_inputs_of_its_rank() -> None:
    loader, checkpoint, _ = loader_of(1, 2, 96)
    shares = loader.input_shares(f"{NAME}.weight", 96)
    x = torch.randn(3, 2 * len(shares.own))
    gate, up = x.chunk(2, dim=1)
    weight = checkpoint.tensors[f"{NAME}.weight"][:, shares.own.start : shares.own.stop]
    result = loader.row_parallel_linear(NAME, 64, shares, "silu")(x)
    torch.testing.assert_close(result, (torch.nn.functional.silu(gate) * up) @ weight.T)


def test_row_parallel_linear_without_sums_gathers_inputs_and_outputs() -> None:
    loader, _, ops = loader_of(0, 2, 96, sums=False)
    assert exchanges_of(loader, ops, loader.input_shares(f"{NAME}.weight", 96)) == ["gather", "gather"]


def test_row_parallel_linear_of_one_rank_exchanges_nothing() -> None:
    loader, _, ops = loader_of(0, 1, 96, sums=False)
    assert exchanges_of(loader, ops, loader.input_shares(f"{NAME}.weight", 96)) == []


def test_input_columns_of_each_rank_are_whole_quantized_blocks_of_the_file() -> None:
    loader, _, ops = loader_of(0, 2, 768, block=256)
    shares = loader.input_shares(f"{NAME}.weight", 768)
    assert [len(columns) for columns in shares.ranges] == [512, 256]
    assert exchanges_of(loader, ops, shares) == ["sum"]


def test_matrix_with_fewer_blocks_than_ranks_uses_gathers_instead_of_a_sum() -> None:
    loader, _, ops = loader_of(0, 2, 256, block=256)
    shares = loader.input_shares(f"{NAME}.weight", 256)
    assert [len(columns) for columns in shares.ranges] == [128, 128]
    assert exchanges_of(loader, ops, shares) == ["gather", "gather"]


def test_matrix_whose_head_columns_cut_a_block_uses_gathers_instead_of_a_sum() -> None:
    """Each rank gets two heads of 64 inputs, which are half of a quantized block of 256."""
    loader, _, ops = loader_of(0, 2, 256, block=256)
    heads = loader.head_shares(4, 4).queries.times(64)
    assert exchanges_of(loader, ops, heads) == ["gather", "gather"]
    loader, _, ops = loader_of(0, 2, 512, block=256)
    assert exchanges_of(loader, ops, loader.head_shares(8, 8).queries.times(64)) == ["sum"]


@pytest.mark.parametrize(("quant", "inputs", "widths"), [("q4k", 768, [512, 256]), ("q4_0", 96, [64, 32])])
def test_input_columns_of_each_rank_are_whole_blocks_of_quantization_at_load(
    quant: str, inputs: int, widths: list[int]
) -> None:
    loader, _, ops = loader_of(0, 2, inputs, quant=quant)
    shares = loader.input_shares(f"{NAME}.weight", inputs)
    assert [len(columns) for columns in shares.ranges] == widths
    assert exchanges_of(loader, ops, shares) == ["sum"]


def test_matrix_with_too_few_inputs_for_the_number_of_ranks_is_rejected() -> None:
    loader, _, _ = loader_of(0, 3, 32)
    with pytest.raises(ModelFileError, match="32 rows, too few for 3 ranks with at least 16 rows each"):
        loader.input_shares(f"{NAME}.weight", 32)


def test_vision_layer_without_the_bias_of_one_of_its_weights_is_rejected(tmp_path: Path) -> None:
    tensors = {f"{name}.weight": torch.ones(32, 32) for name in "qkv"}
    tensors |= {f"{name}.bias": torch.ones(32) for name in "qv"}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    ops = ReferenceOps(torch.device("cpu"), torch.float32)
    with SafetensorsCheckpoint(tmp_path) as checkpoint:
        loader = TowerLoader(Loader(checkpoint, ops, lambda done: None))
        with pytest.raises(ModelFileError, match=r"the model has no tensor k\.bias"):
            loader.padded_linear(["q", "k", "v"], Blocks(1, 32, 32), 32, 32)
