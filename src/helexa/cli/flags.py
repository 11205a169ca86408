"""Command line options that several commands have: where the model runs, and sampling."""

from dataclasses import asdict, dataclass
from typing import Annotated, Literal

from cyclopts import Parameter

from helexa.generation.sampling import Sampling
from helexa.generation.targets import PRIVATE, ModelLocation

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
    """

    url: str | None = None
    private: Switch = False
    device: str | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] | None = None
    quant: str | None = None

    def location(self, model: str | None) -> ModelLocation:
        """Return a `ModelLocation` for `model` and these options. It tells the library where to run which model."""
        return ModelLocation(model, PRIVATE if self.private else self.url, self.device, self.dtype, self.quant)


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
