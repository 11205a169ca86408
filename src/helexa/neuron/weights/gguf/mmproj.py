"""Read `mmproj` files, which contain the vision tower of a GGUF model.

Keys and tensor names follow llama.cpp (`conversion/`, `tools/mtmd/clip-impl.h`). This module does not import torch.
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from helexa.core.errors import ModelFileError, UnsupportedModelError
from helexa.neuron.weights.gguf.files import GgufFile, gguf_models, is_mmproj
from helexa.neuron.weights.gguf.header_and_metadata_reader import read_header
from helexa.neuron.weights.gguf.typed_metadata_and_token_types import Metadata

_ARCHITECTURE = "clip"
_PRECISIONS = ("bf16", "f16", "q8_0", "f32")  # in the order of preference if there are several files
# Parts of a file name that do not belong to the name of the model.
_NO_NAME = re.compile(r"[-_.]?mmproj[-_.]?|[-_.]?(?:model[-_.])?(?:bf16|f16|f32|q8_0)$")
_EMBEDDING, _PROJECTION = ".embedding_length", ".vision.projection_dim"
_BLOCK = re.compile(r"v\.blk\.(?P<block>\d+)\.(?P<module>\w+)\.(?P<kind>\w+)", re.ASCII)
_DEEPSTACK = re.compile(r"v\.deepstack\.(?P<block>\d+)\.(?P<module>norm|fc1|fc2)\.(?P<kind>weight|bias)", re.ASCII)
_CAUSAL_GEMMA4 = (1536, 2560)  # hidden sizes of Gemma 4 E2B and E4B, whose image tokens attend to earlier tokens only
_CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)

_Config = dict[str, Any]


class _Projector(NamedTuple):
    """How to read `mmproj` files with one type of projector."""

    # function that returns the keys of `config.json` and of `preprocessor_config.json`
    read: Callable[[Metadata, GgufFile], tuple[_Config, _Config]]
    modules: Mapping[str, str]  # Hugging Face names by GGUF names, for the modules outside the blocks
    block: str  # Hugging Face prefix of the blocks
    block_modules: Mapping[str, str]  # Hugging Face names by GGUF names, for the modules of a block
    # GGUF names of the modules of a block whose rows are interleaved in pairs for ggml's rotary embedding
    interleaved: tuple[str, ...] = ()


def mmproj_beside(model: Path) -> Path | None:
    """Return the `mmproj` file beside a GGUF model that fits the model, or None.

    A file fits unless the header states another width of embeddings than the model has. A file with the name of the
    model is preferred, then a file with 16-bit weights.
    """
    folder = model if model.is_dir() else model.parent
    files = sorted(path for path in folder.glob("*.gguf") if is_mmproj(path.name) and path != model)
    if files and model.is_dir():
        models = gguf_models(folder)
        model = models[0] if len(models) == 1 else model

    def rank(path: Path) -> tuple[bool, int]:
        name = path.name.lower()
        precisions = (place for place, precision in enumerate(_PRECISIONS) if precision in name)
        stem = _NO_NAME.sub("", path.stem.lower())
        return not stem or stem not in model.name.lower(), next(precisions, len(_PRECISIONS))

    # A folder may have `mmproj` files of several models. The width of the projector's outputs must be the model's
    # hidden size.
    width = _value(model, _EMBEDDING) if files else None
    fitting = (path for path in files if width is None or _value(path, _PROJECTION) in (None, width))
    return min(fitting, key=rank, default=None)


def _value(path: Path, ending: str) -> Any:
    """Return the value of a file's only key that ends with `ending`; None if unknown."""
    try:
        metadata = read_header(path).metadata
    except ModelFileError:  # the load reports the error
        return None
    values = [value for key, value in metadata.items() if key.endswith(ending)]
    return values[0] if len(values) == 1 else None


def mmproj_config(file: GgufFile) -> tuple[_Config, _Config]:
    """Return the configuration of the vision tower in an `mmproj` file.

    Returns:
        Settings with the keys of `config.json`, including `vision_config`, and settings with the keys of
        `preprocessor_config.json`.

    Raises:
        ModelFileError: the file has no vision tower, its projector is not supported, or a key is missing or invalid.
    """
    return _projector(file).read(Metadata(file), file)


def hugging_face_names(file: GgufFile) -> dict[str, str]:
    """Return the Hugging Face names of an `mmproj` file's tensors, by stored name.

    The names have no prefix, such as `model.visual.`. Tensors without a Hugging Face name are left out.

    Raises:
        ModelFileError: the file has no vision tower, or its projector is not supported.
    """
    projector = _projector(file)
    deepstack = _deepstack_layers(file)
    modules = projector.block_modules
    if _has_swapped_names(file):
        modules = {**modules, "ffn_up": modules["ffn_down"], "ffn_down": modules["ffn_up"]}
    names: dict[str, str] = {}
    for name in file.tensors:
        block, stacked = _BLOCK.fullmatch(name), _DEEPSTACK.fullmatch(name)
        module, _, kind = name.rpartition(".")
        if block and block["module"] in modules:
            names[name] = f"{projector.block}.{block['block']}.{modules[block['module']]}.{block['kind']}"
        elif stacked and int(stacked["block"]) in deepstack:
            place = deepstack.index(int(stacked["block"]))
            renamed = {"norm": "norm", "fc1": "linear_fc1", "fc2": "linear_fc2"}[stacked["module"]]
            names[name] = f"deepstack_merger_list.{place}.{renamed}.{stacked['kind']}"
        elif name in projector.modules:
            names[name] = projector.modules[name]
        elif module in projector.modules:
            names[name] = f"{projector.modules[module]}.{kind}"
    return names


def interleaved_heads(file: GgufFile, name: str) -> int:
    """Return the number of heads whose rows GGUF interleaves; 0 for other tensors.

    `name` is the stored name of the tensor.
    """
    block = _BLOCK.fullmatch(name)
    interleaved = block is not None and block["module"] in _projector(file).interleaved
    return Metadata(file).integer("vision.attention.head_count") if interleaved else 0


def _projector(file: GgufFile) -> _Projector:
    if file.architecture != _ARCHITECTURE:
        raise ModelFileError(
            f"{file.path.name} is not an mmproj file: its architecture is '{file.architecture}', expected "
            f"'{_ARCHITECTURE}'",
            advice="use the mmproj file of this model",
        )
    metadata = Metadata(file)
    name = metadata.text("projector_type", metadata.text("vision.projector_type", "none"))
    if name not in _PROJECTORS:
        raise UnsupportedModelError(
            f"{file.path.name}: unsupported projector '{name}'; supported: {', '.join(_PROJECTORS)}"
        )
    return _PROJECTORS[name]


def _has_swapped_names(file: GgufFile) -> bool:
    """Return whether the feed-forward matrices have swapped names, as in old files."""
    up, down = (file.tensors.get(f"v.blk.0.{name}.weight") for name in ("ffn_up", "ffn_down"))
    hidden = file.metadata.get("clip.vision.embedding_length")
    return up is not None and down is not None and up.shape[-1] != hidden == down.shape[-1]


def _deepstack_layers(file: GgufFile) -> list[int]:
    blocks = Metadata(file).integer("vision.block_count")
    flags = Metadata(file).flags("vision.is_deepstack_layers", blocks) or []
    return [block for block, flag in enumerate(flags) if flag]


def _qwen3(metadata: Metadata, file: GgufFile) -> tuple[_Config, _Config]:
    positions = file.tensors.get("v.position_embd.weight")
    if positions is None:
        raise ModelFileError(f"{file.path.name}: the file has no tensor v.position_embd.weight")
    vision = {**_qwen(metadata), "num_position_embeddings": positions.shape[0]}
    preprocessor = _preprocessor(metadata, file)
    # All published models use a mean of 0.5, the default. One converter writes CLIP's mean and deviation if the model's
    # preprocessor file is missing.
    if all(abs(value - clip) < 1e-6 for value, clip in zip(preprocessor["image_mean"], _CLIP_MEAN, strict=False)):
        del preprocessor["image_mean"], preprocessor["image_std"]
    deepstack = _deepstack_layers(file)
    if not deepstack:
        return {"model_type": "qwen3_5", "vision_config": vision}, preprocessor
    return {"model_type": "qwen3_vl", "vision_config": {**vision, "deepstack_visual_indexes": deepstack}}, preprocessor


def _qwen2_5(metadata: Metadata, file: GgufFile) -> tuple[_Config, _Config]:
    vision, every = _qwen(metadata), metadata.integer("vision.n_wa_pattern")
    vision["fullatt_block_indexes"] = list(range(every - 1, vision["depth"], every))
    vision["window_size"] = metadata.integer("vision.window_size", 112)
    return {"model_type": "qwen2_5_vl", "vision_config": vision}, _preprocessor(metadata, file)


def _qwen(metadata: Metadata) -> _Config:
    return {
        "depth": metadata.integer("vision.block_count"),
        "hidden_size": metadata.integer("vision.embedding_length"),
        "intermediate_size": metadata.integer("vision.feed_forward_length"),
        "num_heads": metadata.integer("vision.attention.head_count"),
        "patch_size": metadata.integer("vision.patch_size"),
        "spatial_merge_size": metadata.integer("vision.spatial_merge_size", 2),
        "hidden_act": _activation(metadata),
    }


def _gemma3(metadata: Metadata, file: GgufFile) -> tuple[_Config, _Config]:
    vision = _siglip(metadata)
    side = vision["image_size"] // vision["patch_size"] // metadata.integer("vision.projector.scale_factor", 4)
    return {"model_type": "gemma3", "vision_config": vision, "mm_tokens_per_image": side**2}, _preprocessor(
        metadata, file
    )


def _idefics3(metadata: Metadata, file: GgufFile) -> tuple[_Config, _Config]:
    vision = _siglip(metadata)
    preprocessor = _preprocessor(metadata, file)
    preprocessor["max_image_size"] = {"longest_edge": vision["image_size"]}
    if "vision.preproc_image_size" in metadata:
        preprocessor["size"] = {"longest_edge": metadata.integer("vision.preproc_image_size")}
    scale_factor = metadata.integer("vision.projector.scale_factor", 2)
    return {"model_type": "idefics3", "vision_config": vision, "scale_factor": scale_factor}, preprocessor


def _gemma4(metadata: Metadata, file: GgufFile) -> tuple[_Config, _Config]:
    positions = file.tensors.get("v.position_embd.weight")
    if positions is None or len(positions.shape) != 3:
        raise ModelFileError(f"{file.path.name}: the file has no tensor v.position_embd.weight with three dimensions")
    vision = {
        "num_hidden_layers": metadata.integer("vision.block_count"),
        "hidden_size": (hidden := metadata.integer("vision.embedding_length")),
        "intermediate_size": metadata.integer("vision.feed_forward_length"),
        "num_attention_heads": (heads := metadata.integer("vision.attention.head_count")),
        "head_dim": hidden // heads,
        "patch_size": metadata.integer("vision.patch_size"),
        "pooling_kernel_size": metadata.integer("vision.projector.scale_factor", 3),
        "position_embedding_size": positions.shape[1],
        "rms_norm_eps": metadata.number("vision.attention.layer_norm_epsilon", 1e-6),
        "standardize": "v.std_bias" in file.tensors,
        "use_clipped_linears": "v.blk.0.attn_q.input_min" in file.tensors,
    }
    # Image tokens of the small models attend only to earlier tokens. The file does not say this, so the hidden size
    # identifies these models, as in llama.cpp.
    is_small = metadata.integer("vision.projection_dim") in _CAUSAL_GEMMA4
    text = {"use_bidirectional_attention": None if is_small else "vision"}
    return {"model_type": "gemma4", "vision_config": vision, "text_config": text}, _preprocessor(metadata, file)


def _pixtral(metadata: Metadata, file: GgufFile) -> tuple[_Config, _Config]:
    vision = _siglip(metadata)
    vision["hidden_act"] = {"gelu_pytorch_tanh": "gelu"}.get(vision["hidden_act"], vision["hidden_act"])
    preprocessor = {**_preprocessor(metadata, file), "size": {"longest_edge": vision["image_size"]}}
    merge = metadata.integer("vision.spatial_merge_size", 1)
    eps = {"rms_norm_eps": vision["layer_norm_eps"]}
    if "mm.patch_merger.weight" not in file.tensors:  # Pixtral 12B
        config = {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"}
        return {"model_type": "llava", "vision_config": vision, **config}, preprocessor
    return {
        "model_type": "mistral3",
        "vision_config": vision,
        "spatial_merge_size": merge,
        "text_config": eps,
    }, preprocessor


def _siglip(metadata: Metadata) -> _Config:
    return {
        "num_hidden_layers": metadata.integer("vision.block_count"),
        "hidden_size": metadata.integer("vision.embedding_length"),
        "intermediate_size": metadata.integer("vision.feed_forward_length"),
        "num_attention_heads": metadata.integer("vision.attention.head_count"),
        "image_size": metadata.integer("vision.image_size"),
        "patch_size": metadata.integer("vision.patch_size"),
        "layer_norm_eps": metadata.number("vision.attention.layer_norm_epsilon", 1e-6),
        "hidden_act": _activation(metadata),
    }


def _activation(metadata: Metadata) -> str:
    if metadata.flag("use_silu", False):
        return "silu"
    return "gelu_pytorch_tanh" if metadata.flag("use_gelu", False) else "quick_gelu"


def _preprocessor(metadata: Metadata, file: GgufFile) -> _Config:
    settings: _Config = {}
    for key in ("image_mean", "image_std"):
        values = file.metadata.get(f"clip.vision.{key}")
        if not isinstance(values, list) or not all(isinstance(value, float) for value in values):
            raise metadata.error(f"vision.{key}", "is not a list of numbers")
        settings[key] = values
    for key, setting in (("image_min_pixels", "min_pixels"), ("image_max_pixels", "max_pixels")):
        if f"vision.{key}" in metadata:
            settings[setting] = metadata.integer(f"vision.{key}")
    return settings


_ATTENTION = {"attn_q": "q", "attn_k": "k", "attn_v": "v", "attn_qkv": "qkv", "attn_out": "proj"}
_QWEN_BLOCK = {"ln1": "norm1", "ln2": "norm2", **{name: f"attn.{module}" for name, module in _ATTENTION.items()}}
_SIGLIP_BLOCK = {
    "ln1": "layer_norm1",
    "ln2": "layer_norm2",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_out": "self_attn.out_proj",
    "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
}
_SIGLIP_MODULES = {
    "v.patch_embd": "embeddings.patch_embedding",
    "v.position_embd": "embeddings.position_embedding",
    "v.post_ln": "post_layernorm",
}
# A still image fills both time steps of a patch, whose weights are separate tensors.
_QWEN_MODULES = {"v.patch_embd": "patch_embed.proj", "v.patch_embd.weight.1": "patch_embed.proj.weight.1"}
_PIXTRAL_BLOCK = {
    "ln1": "attention_norm",
    "ln2": "ffn_norm",
    "attn_q": "attention.q_proj",
    "attn_k": "attention.k_proj",
    "attn_v": "attention.v_proj",
    "attn_out": "attention.o_proj",
    "ffn_gate": "feed_forward.gate_proj",
    "ffn_up": "feed_forward.up_proj",
    "ffn_down": "feed_forward.down_proj",
}
_PROJECTORS = {
    "qwen3vl_merger": _Projector(
        _qwen3,
        {
            **_QWEN_MODULES,
            "v.position_embd": "pos_embed",
            "v.post_ln": "merger.norm",
            "mm.0": "merger.linear_fc1",
            "mm.2": "merger.linear_fc2",
        },
        "blocks",
        {**_QWEN_BLOCK, "ffn_up": "mlp.linear_fc1", "ffn_down": "mlp.linear_fc2"},
    ),
    "qwen2.5vl_merger": _Projector(
        _qwen2_5,
        {**_QWEN_MODULES, "v.post_ln": "merger.ln_q", "mm.0": "merger.mlp.0", "mm.2": "merger.mlp.2"},
        "blocks",
        {**_QWEN_BLOCK, "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"},
    ),
    "gemma3": _Projector(
        _gemma3,
        {
            **_SIGLIP_MODULES,
            "mm.input_projection.weight": "multi_modal_projector.mm_input_projection_weight",
            "mm.soft_emb_norm": "multi_modal_projector.mm_soft_emb_norm",
        },
        "encoder.layers",
        _SIGLIP_BLOCK,
    ),
    "pixtral": _Projector(
        _pixtral,
        {
            "v.patch_embd": "patch_conv",
            "v.pre_ln": "ln_pre",
            "mm.input_norm": "multi_modal_projector.norm",
            "mm.patch_merger": "multi_modal_projector.patch_merger.merging_layer",
            "mm.1": "multi_modal_projector.linear_1",
            "mm.2": "multi_modal_projector.linear_2",
        },
        "transformer.layers",
        _PIXTRAL_BLOCK,
        interleaved=("attn_q", "attn_k"),
    ),
    "gemma4v": _Projector(
        _gemma4,
        {
            "v.patch_embd": "patch_embedder.input_proj",
            "v.position_embd.weight": "patch_embedder.position_embedding_table",
            "v.std_bias": "std_bias",
            "v.std_scale": "std_scale",
            "mm.input_projection": "embed_vision.embedding_projection",
        },
        "encoder.layers",
        {
            "ln1": "input_layernorm",
            "ln2": "pre_feedforward_layernorm",
            "attn_post_norm": "post_attention_layernorm",
            "ffn_post_norm": "post_feedforward_layernorm",
            "attn_q_norm": "self_attn.q_norm",
            "attn_k_norm": "self_attn.k_norm",
            **{f"attn_{name}": f"self_attn.{name}_proj" for name in "qkv"},
            "attn_out": "self_attn.o_proj",
            **{f"ffn_{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")},
        },
    ),
    "idefics3": _Projector(
        _idefics3,
        {**_SIGLIP_MODULES, "mm.model.fc": "connector.modality_projection.proj"},
        "encoder.layers",
        _SIGLIP_BLOCK,
    ),
}
