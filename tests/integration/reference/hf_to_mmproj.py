"""Convert the vision part of tiny multimodal models to `mmproj` GGUF files, as llama.cpp's converters do."""

import re
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

PROJECTORS = {
    "qwen3_5": gguf.VisionProjectorType.QWEN3VL,
    "qwen3_vl": gguf.VisionProjectorType.QWEN3VL,
    "qwen2_5_vl": gguf.VisionProjectorType.QWEN25VL,
    "gemma3": gguf.VisionProjectorType.GEMMA3,
    "gemma4": gguf.VisionProjectorType.GEMMA4V,
    "llava": gguf.VisionProjectorType.PIXTRAL,
    "mistral3": gguf.VisionProjectorType.PIXTRAL,
    "idefics3": gguf.VisionProjectorType.IDEFICS3,
    "smolvlm": gguf.VisionProjectorType.IDEFICS3,
}
CLIP = ([0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711])
HALF = ([0.5] * 3, [0.5] * 3)

_QWEN = [
    (r"^(?:model\.)?visual\.", ""),
    (r"patch_embed\.proj", "v.patch_embd"),
    (r"pos_embed", "v.position_embd"),
    (r"merger\.(?:norm|ln_q)", "v.post_ln"),
    (r"merger\.(?:linear_fc1|mlp\.0)", "mm.0"),
    (r"merger\.(?:linear_fc2|mlp\.2)", "mm.2"),
    (r"^blocks", "v.blk"),
    (r"norm([12])", r"ln\1"),
    (r"attn\.(qkv|q|k|v)\.", r"attn_\1."),
    (r"attn\.proj", "attn_out"),
    (r"mlp\.(?:linear_fc1|up_proj)", "ffn_up"),
    (r"mlp\.gate_proj", "ffn_gate"),
    (r"mlp\.(?:linear_fc2|down_proj)", "ffn_down"),
]
_SIGLIP = [
    (r"^(?:model\.)?vision_(?:tower|model)\.(?:vision_model\.)?", ""),
    (r"embeddings\.patch_embedding", "v.patch_embd"),
    (r"embeddings\.position_embedding", "v.position_embd"),
    (r"post_layernorm", "v.post_ln"),
    (r"^encoder\.layers", "v.blk"),
    (r"layer_norm([12])", r"ln\1"),
    (r"self_attn\.([qkv])_proj", r"attn_\1"),
    (r"self_attn\.out_proj", "attn_out"),
    (r"mlp\.fc1", "ffn_up"),
    (r"mlp\.fc2", "ffn_down"),
    (r"^(?:model\.)?multi_modal_projector\.mm_soft_emb_norm", "mm.soft_emb_norm"),
    (r"^(?:model\.)?multi_modal_projector\.mm_input_projection_weight", "mm.input_projection.weight"),
    (r"^(?:model\.)?connector\.modality_projection\.proj", "mm.model.fc"),
]
_PIXTRAL = [
    (r"^(?:model\.)?vision_tower\.", ""),
    (r"patch_conv", "v.patch_embd"),
    (r"ln_pre", "v.pre_ln"),
    (r"^transformer\.layers", "v.blk"),
    (r"attention_norm", "ln1"),
    (r"ffn_norm", "ln2"),
    (r"attention\.([qkv])_proj", r"attn_\1"),
    (r"attention\.o_proj", "attn_out"),
    (r"feed_forward\.(\w+)_proj", r"ffn_\1"),
    (r"^(?:model\.)?multi_modal_projector\.norm", "mm.input_norm"),
    (r"^(?:model\.)?multi_modal_projector\.linear_", "mm."),
    (r"^(?:model\.)?multi_modal_projector\.patch_merger\.merging_layer", "mm.patch_merger"),
]
_GEMMA4 = [
    (r"^(?:model\.)?vision_tower\.", ""),
    (r"patch_embedder\.input_proj", "v.patch_embd"),
    (r"patch_embedder\.position_embedding_table", "v.position_embd.weight"),
    (r"^std_", "v.std_"),
    (r"^(?:model\.)?embed_vision\.embedding_projection", "mm.input_projection"),
    (r"^encoder\.layers", "v.blk"),
    (r"\.linear\.weight", ".weight"),
    (r"input_layernorm", "ln1"),
    (r"pre_feedforward_layernorm", "ln2"),
    (r"post_attention_layernorm", "attn_post_norm"),
    (r"post_feedforward_layernorm", "ffn_post_norm"),
    (r"self_attn\.([qk])_norm", r"attn_\1_norm"),
    (r"self_attn\.([qkv])_proj", r"attn_\1"),
    (r"self_attn\.o_proj", "attn_out"),
    (r"mlp\.(\w+)_proj", r"ffn_\1"),
]
_RULES = {
    "gemma4": _GEMMA4,
    "llava": _PIXTRAL,
    "mistral3": _PIXTRAL,
    "gemma3": _SIGLIP,
    "idefics3": _SIGLIP,
    "smolvlm": _SIGLIP,
}
_SWAPPED = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}


def write_mmproj(
    path: Path,
    model: PreTrainedModel,
    quantization: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    normalization: tuple[list[float], list[float]] = HALF,
    swapped: bool = False,
) -> None:
    """Write the vision part of `model` to `path`.

    Args:
        quantization: type of the matrices whose columns divide into blocks of this type.
        normalization: mean and standard deviation of pixels.
        swapped: whether the names of the matrices of feed-forward layers are swapped, as in old files.
    """
    config, vision = model.config, model.config.vision_config
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_type(gguf.GGUFType.MMPROJ)
    writer.add_clip_has_vision_encoder(True)
    if config.model_type == "gemma4":
        writer.add_clip_vision_projector_type(PROJECTORS[config.model_type])
    else:
        writer.add_clip_projector_type(PROJECTORS[config.model_type])
    writer.add_vision_projection_dim(config.text_config.hidden_size)
    writer.add_vision_image_size(getattr(vision, "image_size", None) or 560)
    writer.add_vision_patch_size(vision.patch_size)
    writer.add_vision_embedding_length(vision.hidden_size)
    writer.add_vision_feed_forward_length(vision.intermediate_size)
    writer.add_vision_block_count(vision.num_hidden_layers)
    writer.add_vision_head_count(vision.num_attention_heads)
    mean, deviation = ([0.0] * 3, [1.0] * 3) if config.model_type == "gemma4" else normalization
    writer.add_vision_image_mean(mean)
    writer.add_vision_image_std(deviation)
    eps = getattr(vision, "layer_norm_eps", None) or getattr(vision, "rms_norm_eps", None)
    writer.add_vision_attention_layernorm_eps(eps or (1e-5 if vision.model_type == "pixtral" else 1e-6))
    _add_own_keys(writer, config)
    for name, tensor in _tensors(model, swapped):
        array = tensor.float().contiguous().numpy()
        blocks = gguf.GGML_QUANT_SIZES[quantization][0]
        matrix = array.ndim == 2 and array.shape[-1] % blocks == 0 and not name.startswith(("v.position", "mm.input"))
        kind = quantization if matrix else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quants.quantize(np.ascontiguousarray(array), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_own_keys(writer: gguf.GGUFWriter, config: PreTrainedConfig) -> None:
    vision = config.vision_config
    if config.model_type == "qwen2_5_vl":
        writer.add_vision_use_silu(True)
        writer.add_vision_n_wa_pattern(vision.fullatt_block_indexes[0] + 1)
        return
    if config.model_type == "gemma4":
        writer.add_vision_projector_scale_factor(vision.pooling_kernel_size)
        return
    if vision.model_type == "pixtral":
        writer.add_vision_use_silu(True)
        if config.model_type == "mistral3":
            writer.add_vision_spatial_merge_size(config.spatial_merge_size)
        return
    writer.add_vision_use_gelu(True)
    if config.model_type.startswith("qwen3"):
        writer.add_vision_spatial_merge_size(vision.spatial_merge_size)
        deepstack = getattr(vision, "deepstack_visual_indexes", ())
        writer.add_vision_is_deepstack_layers([layer in deepstack for layer in range(vision.depth)])
    elif config.model_type == "gemma3":
        side = vision.image_size // vision.patch_size
        writer.add_vision_projector_scale_factor(side // int(config.mm_tokens_per_image**0.5))
    else:
        writer.add_vision_projector_scale_factor(config.scale_factor)
        writer.add_vision_preproc_image_size(2 * vision.image_size)


def _tensors(model: PreTrainedModel, swapped: bool) -> Iterator[tuple[str, Tensor]]:
    rules = _RULES.get(model.config.model_type, _QWEN)
    for name, tensor in model.state_dict().items():
        if "language_model" in name or name.startswith("lm_head"):
            continue
        short = name
        for pattern, replacement in rules:
            short = re.sub(pattern, replacement, short)
        if swapped:
            short = re.sub("ffn_up|ffn_down", lambda match: _SWAPPED[match[0]], short)
        if "deepstack_merger_list" in short:
            place, rest = re.fullmatch(r"deepstack_merger_list\.(\d+)\.(.+)", short).groups()  # type: ignore[union-attr]
            layer = model.config.vision_config.deepstack_visual_indexes[int(place)]
            yield f"v.deepstack.{layer}.{rest.replace('linear_', '')}", tensor
        elif short == "v.patch_embd.weight" and tensor.dim() == 5:
            yield short, tensor[:, :, 0]
            yield f"{short}.1", tensor[:, :, 1]
        elif "attn_qkv" in short and model.config.model_type == "qwen2_5_vl":
            for letter, part in zip("qkv", tensor.chunk(3), strict=True):
                yield short.replace("qkv", letter), part
        elif short == "v.patch_embd.weight" and tensor.dim() == 2:
            yield short, tensor.view(len(tensor), 16, 16, 3).permute(0, 3, 1, 2)
        elif tensor.dim() == 0:
            yield short, tensor[None]
        elif model.config.vision_config.model_type == "pixtral" and re.search(r"attn_[qk]\.", short):
            heads = model.config.vision_config.num_attention_heads
            yield short, tensor.view(heads, 2, -1, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)
        elif short == "v.token_embd":
            continue
        else:
            yield short, tensor + 1 if "soft_emb_norm" in short else tensor


def plain_tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of an `mmproj` file, dequantized by the `gguf` package."""
    return {
        tensor.name: torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type))
        for tensor in gguf.GGUFReader(path).tensors
    }
