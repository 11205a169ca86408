"""Facts about a loaded model that the engine needs: sizes, limits and the granted memory."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelFacts:
    """Sizes and limits of a loaded model, and the memory granted for it.

    Attributes:
        context_length: maximum number of positions (tokens) of a sequence.
        parameters: number of the model's parameters.
        weight_bytes: bytes of the tensors in the model's files.
        step_bytes: bytes of weights that one decode step reads from memory, in the format of the kernels.
        token_bytes: bytes of K and V of one token in all layers.
        kv_bytes, kv_pages: size of the whole KV cache, in bytes and in pages.
        state_bytes: bytes of the recurrent state of one sequence; 0 for a model without recurrent layers.
        snapshots: number of snapshots of recurrent state for which memory is granted.
        max_sequences: maximum number of running sequences for which memory is granted.
        memory_bytes: bytes granted for the model, its caches and its steps.
        quant: format to which unquantized weights were quantized while loading; empty for no quantization.
        token_seconds: duration of a step with one token, measured after loading.
    """

    model_type: str
    vocab_size: int
    context_length: int
    parameters: int
    weight_bytes: int
    step_bytes: int
    token_bytes: int
    kv_bytes: int
    kv_pages: int
    state_bytes: int
    snapshots: int
    max_sequences: int
    memory_bytes: int
    quant: str
    token_seconds: float = 0.0
