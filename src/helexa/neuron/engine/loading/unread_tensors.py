"""Rejects checkpoints with tensors that no layer of the model reads. Without them, the model computes wrong answers."""

import re
from collections.abc import Collection

from helexa.core.errors import ModelFileError
from helexa.neuron.layers.stage import Stage
from helexa.neuron.weights.checkpoint import Checkpoint

_SHOWN = 3
_LAYER = re.compile(r"model\.layers\.(\d+)\.", re.ASCII)
_UNNEEDED = re.compile(
    r"lm_head\.weight"  # a copy of the embedding: an output head that is not tied is always read
    r"|.*\.rotary_emb\.(?:inv_freq|cos_cached|sin_cached)"  # buffers that follow from the configuration
    r"|.*\.(?:self_attn|attn|attention)\.(?:masked_bias|bias)"  # constants of the causal mask in old checkpoints
    r"|.*\.input_scale"  # scale of quantized activations; the kernels here do not need the scale
    r"|.*\.(?:[qkv]|kv|prob|attn)(?:_proj)?[._](?:output_)?scale|.*\.[kv]_proj\.[kv]_scale"  # scales of an fp8 KV cache
)


def require_all_read(
    checkpoint: Checkpoint, read: Collection[str], stage: Stage, layers: int, architecture: str
) -> None:
    """Check that the model reads every tensor of the checkpoint, except tensors of other stages and unneeded tensors.

    Args:
        read: names of the tensors that the model of this stage reads.
        layers: number of decoder layers of the whole model.
        architecture: name of the model's architecture, for the error message.

    Raises:
        ModelFileError: the model does not read a tensor. The message has the first names and what to do.
    """
    own = stage.layers(layers)
    unread: list[str] = []
    for name in checkpoint.names():
        layer = _LAYER.match(name)
        elsewhere = int(layer[1]) not in own and int(layer[1]) < layers if layer else not stage.is_first
        if not elsewhere and name not in read and not _UNNEEDED.fullmatch(name):
            unread.append(checkpoint.stored_name(name))
    if unread:
        names = ", ".join(unread[:_SHOWN]) + (" .." if len(unread) > _SHOWN else "")
        count = f"{len(unread)} tensors" if len(unread) > 1 else "a tensor"
        raise ModelFileError(
            f"the model has {count} that the architecture '{architecture}' does not read: {names}; without "
            f"{'them' if len(unread) > 1 else 'it'}, the answers would be wrong. The file may state a wrong "
            "architecture or number of layers: convert the original model again, or use another file of the model"
        )
