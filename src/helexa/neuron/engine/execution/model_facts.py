"""Sizes of a loaded model, which the engine reports to the server."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelFacts:
    """Sizes of a loaded model and of its granted memory.

    Attributes:
        context_length: maximum positions of a sequence.
        parameters: number of weights.
        weight_bytes: bytes of the tensors in the model's files.
        step_bytes: bytes of weights that one decode step reads, in the format of the kernels.
        token_bytes: bytes of K and V of one token in all layers.
        kv_bytes, kv_pages: size of the whole KV cache.
        state_bytes: bytes of the recurrent state of one sequence; 0 for a model without recurrent layers.
        snapshots: number of snapshots of recurrent state in the granted memory.
        max_sequences: maximum number of running sequences in the granted memory.
        memory_bytes: bytes granted for the model, its caches and its steps.
        quant: format to which unquantized weights were quantized while loading; empty for no quantization.
        token_seconds: seconds of a step with one token right after loading.
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
