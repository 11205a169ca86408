"""Options that several commands share: where to ask, and how answers are sampled."""

from dataclasses import asdict, dataclass
from typing import Annotated, Literal

from cyclopts import Parameter

from helexa.generation.sampling import Sampling
from helexa.generation.targets import PRIVATE, Place

Switch = Annotated[bool, Parameter(negative="")]
Quiet = Annotated[bool, Parameter(alias="-q", negative="")]
Verbose = Annotated[bool, Parameter(alias="-v", negative="")]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Where:
    """Where the model runs.

    Attributes:
        url: Gateway or node to ask, else HELEXA_BASE_URL, else one on this machine that has the model loaded, else a
            private engine.
        private: Always a private engine, which ends with the command.
        device: Of a private engine: auto, cpu, mps, cuda or cuda:N; else HELEXA_DEVICE.
        dtype: Of a private engine: what it computes in.
        quant: Of a private engine: which quantisation of the model, such as q4_k_m.
    """

    url: str | None = None
    private: Switch = False
    device: str | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] | None = None
    quant: str | None = None

    def place(self, model: str | None) -> Place:
        """The same in the library's terms."""
        return Place(model, PRIVATE if self.private else self.url, self.device, self.dtype, self.quant)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class SamplingFlags:
    """How answers are sampled.

    Attributes:
        max_tokens: Most tokens an answer may have.
        temperature: Randomness; 0 always takes the likeliest token.
        top_p: Choose among the likeliest tokens that together are this probable.
        top_k: Choose among this many of the likeliest tokens.
        min_p: Choose among tokens at least this probable, as a share of the likeliest.
        repetition_penalty: Make what was said already less likely; 1 is off.
        frequency_penalty: The same, more for what was said more often; 0 is off.
        presence_penalty: The same, for what was said at all; 0 is off.
        seed: Makes sampling repeatable. Answer number i has the seed plus i.
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
        """The same in the library's terms."""
        return Sampling(**asdict(self))
