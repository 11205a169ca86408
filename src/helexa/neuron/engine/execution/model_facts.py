"""What a loaded model says of itself."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelFacts:
    """Sizes of a loaded model and of the memory that it was granted.

    Attributes:
        weight_bytes: of its tensors in their files.
        step_bytes: of the weights that one decode step reads, as the kernels hold them.
        token_bytes: of K and V of one token in all layers.
        kv_bytes, kv_pages: of the whole cache.
        state_bytes: of what recurrent layers keep of one sequence; 0 for a model without such.
        quant: what plain weights became while they loaded, empty if they stayed as they were.
        snapshots: of that state that there is room for.
        max_sequences: that there is room for.
        token_seconds: that a step of one token took when the model had been loaded.
        memory_bytes: granted for all of this, and for steps.
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
