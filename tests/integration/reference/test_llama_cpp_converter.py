"""GGUF files written by llama.cpp's own converter, compared with llama.cpp and with transformers.

The rule: `exact` are the logits of transformers in float32, with the same weights. helexa's error against `exact` is at
most 1e-4, as in the other comparisons of this folder, and helexa differs from llama.cpp by at most llama.cpp's own
error against `exact` plus 1e-4. llama.cpp computes in float32, too, but has a table of GELU values in 16 bits.
"""

import json
import string
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import tokenizers
import torch
from tokenizers import decoders, models, normalizers, pre_tokenizers
from transformers import AutoModelForImageTextToText, PreTrainedModel

from helexa.neuron.engine.ipc.engine_options import EngineOptions
from helexa.neuron.engine.loading.load import load_once
from helexa.neuron.weights.gguf.checkpoint import GgufCheckpoint
from helexa.neuron.weights.gguf.files import GgufFile
from neuron.weights.hf_to_gguf import write_model
from nightly import daily
from reference import llama_cpp, test_gemma4, test_gguf, test_gguf_hybrid
from reference.test_gguf import state
from tiny_models import decode, tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

SPECIAL = ["<|endoftext|>", "[gMASK]", "<|user|>", "<|observation|>"]
"""Tokens that the converter of GLM models requires."""
VARIANTS: dict[str, dict[str, Any]] = {
    kind: module.SHAPE | settings
    for module in (test_gguf, test_gguf_hybrid)
    for kind, settings in module.VARIANTS.items()
}
del VARIANTS["qwen3_5_moe_text"]  # transformers would replace the pre-tokenizer of the tests' tokenizer
LINEAR = {"linear_key_head_dim": 32, "linear_value_head_dim": 32}  # llama.cpp needs heads of the same size
VARIANTS |= {
    "qwen2": test_gguf.SHAPE | {"head_dim": 16, "tie_word_embeddings": True},
    "qwen3_next": VARIANTS["qwen3_next"] | LINEAR,
    "qwen3_5_text": VARIANTS["qwen3_5_text"] | LINEAR,
    "lfm2": VARIANTS["lfm2"] | {"head_dim": 16},
    "lfm2_moe": VARIANTS["lfm2_moe"] | {"head_dim": 16},
    "deepseek_v2": VARIANTS["deepseek_v3"] | {"n_group": 1, "topk_group": 1, "norm_topk_prob": False},
    # llama.cpp has a sliding window only in the model with 64 layers, and ignores the window of Phi-3.
    "exaone4": test_gguf.SHAPE | {"head_dim": 16, "sliding_window": None, "layer_types": ["full_attention"] * 3},
    "phi3": VARIANTS["phi3"] | {"sliding_window": 512},
    # llama.cpp rounds the bounds of YaRN, which this model does not.
    "gpt_oss": VARIANTS["gpt_oss"] | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    # The converter computes the width of the shared experts from `intermediate_size` and the number of KV heads.
    "ernie4_5_moe": VARIANTS["ernie4_5_moe"] | {"intermediate_size": 128},
    # The converter states no rotary embedding, and this context length.
    "granitemoehybrid": VARIANTS["granitemoehybrid"]
    | {"num_local_experts": 4, "position_embedding_type": "nope", "max_position_embeddings": 2**20},
    "nemotron_h": VARIANTS["nemotron_h"] | {"max_position_embeddings": 2**20},
    "gemma4 with shared keys": test_gemma4.SMALL,
    "gemma4 with experts": test_gemma4.VARIANTS["as 26B-A4B"],
}
SENTENCEPIECE = {"llama", "ministral3", "granite", "smollm3", "arcee", "gemma", "gemma2", "gemma3_text", "phi3"}
SENTENCEPIECE |= {"qwen2", "granitemoe", "granite_swa", "granitemoehybrid", "ernie4_5", "ernie4_5_moe"}
"""Models with a SentencePiece vocabulary of 512 tokens."""
RELEASED: dict[str, dict[str, Any]] = {
    "cohere2": {"rotary_pct": 1.0},
    "deepseek_v2": {"scoring_func": "softmax"},
    "deepseek_v3": {"scoring_func": "sigmoid"},
    "granite_swa": {"no_rope_layers": [0, 1, 1]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention", "mamba", "mamba"]},
    "minimax_m2": {"scoring_func": "sigmoid", "rotary_dim": 16},
}
"""Keys of `config.json` that released models have, and that transformers does not write, or writes in another form."""
TOKENS = {"bos_token_id", "eos_token_id", "suppress_tokens"}
WITHOUT_MTP = {"qwen3_next", "qwen3_5_text", "glm4_moe"}
"""Models of which the converter expects layers for multi-token prediction, unless it has the option `--no-mtp`."""


class Converted(NamedTuple):
    """A random model, and its GGUF file from llama.cpp's converter."""

    reference: PreTrainedModel
    file: Path
    vocabulary: int
    """Number of tokens that the model may generate. The files of models with GPT-2's vocabulary have unused rows."""


@pytest.fixture(scope="module")
def byte_level_bpe(llama_cpp_models: Path) -> tokenizers.Tokenizer:
    """GPT-2's tokenizer, which the converter recognizes."""
    metadata = GgufFile.open(llama_cpp_models / "ggml-vocab-gpt-2.gguf").metadata
    tokens, merges = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.merges"]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[tuple(pair.split(" ")) for pair in merges]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


@pytest.fixture(scope="module")
def sentencepiece_model() -> bytes:
    """A SentencePiece tokenizer, trained on the README."""
    import sentencepiece  # only nightly tests need the library

    text, trained = Path(__file__).parents[3] / "README.md", BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(text.read_text().splitlines()),
        model_writer=trained,
        vocab_size=512,
        model_type="bpe",
        byte_fallback=True,
        minloglevel=2,
    )
    return trained.getvalue()


@pytest.fixture(scope="module")
def byte_fallback_bpe() -> tokenizers.Tokenizer:
    """A tokenizer of Gemma 4's kind, with 512 tokens."""
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581"]
    tokens += [*string.ascii_letters, "th", "the"]
    tokens += [f"word{number}" for number in range(512 - len(tokens))]
    vocabulary, merges = {token: number for number, token in enumerate(tokens)}, [("t", "h"), ("th", "e")]
    bpe = models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = tokenizers.Tokenizer(bpe)
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


@pytest.fixture(scope="module", params=daily((), VARIANTS))
def converted(
    request: pytest.FixtureRequest,
    byte_level_bpe: tokenizers.Tokenizer,
    sentencepiece_model: bytes,
    byte_fallback_bpe: tokenizers.Tokenizer,
    tmp_path_factory: pytest.TempPathFactory,
) -> Converted:
    kind, folder = request.param, tmp_path_factory.mktemp("converted")
    small = kind in SENTENCEPIECE or kind.startswith("gemma4")
    settings = {"model_type": kind} | VARIANTS[kind] | {"vocab_size": 512 if small else 50_304}
    if "vocab_size_per_layer_input" in settings:
        settings["vocab_size_per_layer_input"] = 512
    reference = tiny_model(folder, **settings)
    if kind in SENTENCEPIECE:
        (folder / "tokenizer.model").write_bytes(sentencepiece_model)
    else:
        write_bpe(byte_fallback_bpe if small else byte_level_bpe, folder)
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | RELEASED.get(kind, {})))
    options = ["--no-mtp"] if kind in WITHOUT_MTP else []
    file = llama_cpp.convert(folder, folder / "converted.gguf", *options)
    return Converted(reference, file, 512 if small else byte_level_bpe.get_vocab_size())


def test_logits_of_llama_cpp_converted_files_equal_transformers_up_to_rounding(converted: Converted) -> None:
    assert_rounding(converted, limit=0.01)


@pytest.mark.nightly
@pytest.mark.parametrize(("kind", "dtype", "limit"), [("f16", torch.float16, 0.01), ("bf16", torch.bfloat16, 0.05)])
def test_logits_of_converted_16_bit_matrices_equal_transformers_up_to_rounding(
    kind: str, dtype: torch.dtype, limit: float, sentencepiece_model: bytes, tmp_path: Path
) -> None:
    reference = tiny_model(tmp_path, **VARIANTS["llama"] | {"model_type": "llama", "vocab_size": 512})
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_model)
    for parameter in reference.parameters():
        if parameter.dim() > 1:  # the converter keeps vectors in float32
            parameter.data = parameter.data.to(dtype).float()
    file = llama_cpp.convert(tmp_path, tmp_path / "converted.gguf", kind=kind)
    assert_rounding(Converted(reference, file, 512), limit)


@pytest.mark.nightly
def test_logits_of_converted_muse_glimmer_equal_transformers_up_to_rounding(
    byte_level_bpe: tokenizers.Tokenizer, tmp_path: Path
) -> None:
    text = {"model_type": "muse_glimmer_text", "num_hidden_layers": 5, "sliding_window": 40, "vocab_size": 50_304}
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    settings = {"text_config": test_gguf.SHAPE | text, "vision_config": vision}
    settings |= {"out_hidden_size": 128, "projector_hidden_size": 32}
    reference = tiny_model(tmp_path, auto=AutoModelForImageTextToText, model_type="muse_glimmer", **settings)
    write_bpe(byte_level_bpe, tmp_path)
    file = llama_cpp.convert(tmp_path, tmp_path / "converted.gguf")
    assert_rounding(Converted(reference, file, byte_level_bpe.get_vocab_size()), limit=0.01)


def write_bpe(tokenizer: tokenizers.Tokenizer, folder: Path) -> None:
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))


def assert_rounding(converted: Converted, limit: float) -> None:
    """Apply the rule above.

    Args:
        limit: largest error of llama.cpp. A larger error means that the file contains another model.
    """
    reference, file, vocabulary = converted
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, vocabulary, (length,), generator=generator).tolist() for length in (1, 30, 100)]
    ours = decode(load_once(file, EngineOptions(dtype="float32", context_length=512, kv_cache_mb=16)), prompts, steps=4)
    texts = [prompt + tokens for prompt, (tokens, _) in zip(prompts, ours, strict=True)]
    theirs = llama_cpp.logits(file, texts)
    for prompt, text, (_, our_logits), their_logits in zip(prompts, texts, ours, theirs, strict=True):
        with torch.inference_mode():
            exact = reference(torch.tensor([text])).logits[0, len(prompt) - 1 : -1, :vocabulary]
        our_logits, their_logits = our_logits[:, :vocabulary], their_logits[len(prompt) - 1 : -1, :vocabulary]
        error, their_error, difference = (
            float((one - other).abs().max())
            for one, other in ((our_logits, exact), (their_logits, exact), (our_logits, their_logits))
        )
        assert their_error < limit
        assert error < 1e-4
        assert difference < their_error + 1e-4


def test_file_from_llama_cpps_converter_equals_the_file_that_our_tests_write(
    converted: Converted, tmp_path: Path
) -> None:
    own = write_model(tmp_path / "model.gguf", converted.reference.config, state(converted.reference))
    with GgufCheckpoint(converted.file) as theirs, GgufCheckpoint(own) as ours:
        assert {key: value for key, value in theirs.config.items() if key not in TOKENS} == ours.config
        assert sorted(theirs.names()) == sorted(ours.names())
        for name in theirs.names():
            assert torch.equal(theirs.read(name), ours.read(name)), name
