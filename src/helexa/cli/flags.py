"""Command line options that several commands have: where the model runs, and sampling."""

from dataclasses import asdict, dataclass
from typing import Annotated

from cyclopts import Parameter

from helexa.generation.sampling import Sampling
from helexa.generation.targets import PRIVATE, ModelLocation
from helexa.neuron.engine_flags import DTYPES, Dtype, EngineFlags

Switch = Annotated[bool, Parameter(negative="")]
Quiet = Annotated[bool, Parameter(alias="-q", negative="")]
Verbose = Annotated[bool, Parameter(alias="-v", negative="")]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class TargetFlags:
    """The target that runs the model.

    Attributes:
        url: Gateway or node to ask, else HELEXA_BASE_URL, else one on this machine that has the model loaded, else a
            private engine.
        private: Always use a private engine, which ends with the command.
        device: Device of a private engine: auto, cpu, mps, cuda or cuda:N; else HELEXA_DEVICE.
        dtype: Data type of a private engine's computation.
        quant: Quantization for a private engine, such as q4_k_m.
        context_length: Context length of a private engine, in tokens; 0 for the model's own.
    """

    url: str | None = None
    private: Switch = False
    device: str | None = None
    dtype: Dtype | None = None
    quant: Annotated[str | None, Parameter(name=["--quant", "--quantization"])] = None
    context_length: Annotated[int | None, Parameter(name=["--max-model-len", "--ctx-size", "-c"])] = None

    def location(self, model: str | None) -> ModelLocation:
        """Return a `ModelLocation` for `model` and these options. It tells the library where to run which model."""
        return ModelLocation(
            model,
            PRIVATE if self.private else self.url,
            self.device,
            self.dtype and DTYPES.get(self.dtype, self.dtype),
            self.quant,
            self.context_length,
        )


@dataclass(frozen=True, kw_only=True)
class LocalEngineFlags(EngineFlags):
    """Engine options of `helexa up`.

    Attributes:
        max_model_len: Context length of each request, in tokens; 0 for the model's own.
    """

    max_model_len: Annotated[int | None, Parameter(name=["--max-model-len", "--ctx-size", "-c"])] = None

    def arguments(self) -> list[str]:
        """Return the command line options that set the same configuration keys of `neuron serve`."""
        return [f"{name}" if value is False else f"{name}={value}" for name, value in self.settings().values()]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class SamplingFlags:
    """Sampling options.

    Attributes:
        max_tokens: Maximum tokens of an answer.
        temperature: Randomness; 0 always selects the most likely token.
        top_p: Sample from the most likely tokens with this total probability.
        top_k: Sample from this number of most likely tokens.
        min_p: Sample from tokens with at least this probability relative to the most likely token.
        repetition_penalty: Make tokens that already occurred less likely; 1 is off.
        frequency_penalty: Make tokens less likely in proportion to their count; 0 is off.
        presence_penalty: Make tokens that occurred at least once less likely; 0 is off.
        seed: Random seed of reproducible answers. Answer number i has the seed plus i.
        stop: A text that ends the answer. May be given several times.
    """

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    seed: int | None = None
    stop: Annotated[list[str] | None, Parameter(negative="")] = None

    def sampling(self) -> Sampling:
        """Return the library's `Sampling` object with these options."""
        return Sampling(**asdict(self))
