"""The quantization format that each tensor gets, and the names of quantizations."""

import pytest

from helexa.core.errors import HelexaError
from helexa.neuron.weights.quantization_formats import NAMES, QUANT_FORMATS, QuantPolicy, automatic, quant_named

LAYER = "model.layers.{}."


def form(name: str, quant: str = "q4k", columns: int = 1024, layers: int = 28) -> str | None:
    quant_format = QuantPolicy(quant, layers).format_of(name, columns)
    return None if quant_format is None else quant_format.name


@pytest.mark.parametrize(
    "suffix",
    [
        "self_attn.q_proj.weight",
        "self_attn.k_proj.weight",
        "self_attn.o_proj.weight",
        "self_attn.v_proj.weight",
        "mlp.gate_proj.weight",
        "mlp.up_proj.weight",
        "mlp.down_proj.weight",
        "mlp.experts.17.gate_proj.weight",
        "mlp.experts.gate_up_proj#17",
        "mlp.experts.down_proj.weight#3",
        "mlp.shared_expert.up_proj.weight",
        "linear_attn.in_proj_qkvz.weight",
        "linear_attn.in_proj_qkv.weight",
        "linear_attn.in_proj_z.weight",
        "linear_attn.out_proj.weight",
        "per_layer_input_gate.weight",
        "per_layer_projection.weight",
    ],
)
def test_layer_matrices_are_quantized_in_the_requested_format(suffix: str) -> None:
    assert form(LAYER.format(14) + suffix) == "q4k"


@pytest.mark.parametrize(
    "suffix",
    [
        "input_layernorm.weight",
        "self_attn.q_norm.weight",
        "self_attn.q_proj.bias",
        "self_attn.sinks",
        "mlp.gate.weight",
        "mlp.router.weight",
        "mlp.shared_expert_gate.weight",
        "mlp.experts.gate_up_proj_bias",
        "linear_attn.conv1d.weight",
        "linear_attn.A_log",
        "linear_attn.dt_bias",
        "linear_attn.norm.weight",
        "linear_attn.in_proj_a.weight",
        "linear_attn.in_proj_b.weight",
        "linear_attn.in_proj_ba.weight",
    ],
)
def test_sensitive_or_small_tensors_are_not_quantized(suffix: str) -> None:
    assert form(LAYER.format(14) + suffix) is None


@pytest.mark.parametrize("suffix", ["down_proj", "v_proj"])
def test_down_and_value_projections_of_the_first_and_last_layers_get_more_bits(suffix: str) -> None:
    names = [f"{LAYER.format(layer)}x.{suffix}.weight" for layer in range(28)]
    assert [form(name) for name in names] == ["q6k"] * 4 + ["q4k"] * 20 + ["q6k"] * 4
    assert {form(name, "q6k") for name in names} == {"q6k", "q8_0"}
    assert {form(name, "q8_0") for name in names} == {"q8_0"}
    assert form(f"{LAYER.format(0)}x.{suffix}.weight", layers=1) == "q6k"
    assert form(f"{LAYER.format(0)}x.up_proj.weight") == "q4k"


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.embed_tokens_per_layer.weight", "lm_head.weight"])
def test_embeddings_and_output_head_are_quantized_with_at_least_6_bits(name: str) -> None:
    formats = {quant: form(name, quant) for quant in QUANT_FORMATS}
    assert formats.pop("q8_0") == "q8_0"
    assert set(formats.values()) == {"q6k"}


def test_rows_not_divisible_into_blocks_get_a_format_of_at_least_equal_precision() -> None:
    name = LAYER.format(14) + "mlp.up_proj.weight"
    assert [form(name, quant, columns=896) for quant in ("q4k", "q5k", "q6k")] == ["q4_1", "q5_1", "q8_0"]
    assert form("lm_head.weight", columns=896) == "q8_0"
    assert form(name, columns=880) is None
    for quant, chosen in QUANT_FORMATS.items():
        for columns in (96, 256, 288, 1024):
            quant_format = QuantPolicy(quant, 28).format_of(name, columns)
            assert quant_format is not None
            assert quant_format.fits(columns)
            assert quant_format.weight_bits >= chosen.weight_bits


@pytest.mark.parametrize("quant", ["", "bf16", "f16", "f32"])
def test_names_of_unquantized_formats_disable_quantization(quant: str) -> None:
    assert form(LAYER.format(14) + "mlp.up_proj.weight", quant) is None
    assert QuantPolicy(quant, 28).quant == ""


@pytest.mark.parametrize(
    ("texts", "name"),
    [
        ("q4k Q4_K q4_k_m Q4KM q4 Q2_K q3k", "q4k"),
        ("q5k q5_K_m q5", "q5k"),
        ("q6k Q6_K q6", "q6k"),
        ("q8_0 q80 Q8 q8_1 q8k", "q8_0"),
        ("q4_0 Q40", "q4_0"),
        ("q5_1", "q5_1"),
        ("AUTO", "auto"),
        ("BF16", "bf16"),
        ("f_32", "f32"),
    ],
)
def test_quant_names_and_aliases_are_recognized(texts: str, name: str) -> None:
    assert {quant_named(text) for text in texts.split()} == {name}


@pytest.mark.parametrize("text", ["", "q9", "q4k ", "iq4_xs", "int4", "q4k" * 100])
def test_unknown_quant_name_is_rejected_with_the_list_of_names(text: str) -> None:
    with pytest.raises(HelexaError, match="known: " + ", ".join(NAMES)) as error:
        quant_named(text)
    assert len(str(error.value)) < 200


def test_quant_auto_selects_the_best_quantization_that_fits_in_memory() -> None:
    shapes = {"model.norm.weight": (1024,), "lm_head.weight": (8192, 1024)}
    shapes |= {f"{LAYER.format(layer)}mlp.up_proj.weight": (4096, 1024) for layer in range(8)}
    weights = sum(4096 * 1024 for _ in range(8)) + 8192 * 1024
    quants = [automatic(shapes, 8, 2 * weights, int(2 * weights * share)) for share in (2.1, 1.5, 0.9, 0.8, 0.1)]
    assert quants == ["bf16", "q8_0", "q6k", "q4k", "q4k"]
    assert automatic(shapes, 8, weights // 2, 2 * weights) == "bf16", "the files are small already"


def test_estimated_weight_bytes_follow_the_quantization_policy() -> None:
    shapes = {"lm_head.weight": (64, 256), "model.norm.weight": (256,), "model.layers.0.mlp.gate.weight": (8, 256)}
    plain, head = (256 + 8 * 256) * 2, 64 * 256 * 6.5625 / 8
    assert QuantPolicy("q4k", 1).weight_bytes(shapes) == plain + head
