"""The sampling options of requests: names, types, bounds and help texts.

Other classes with these options derive from the classes in this module: request bodies (`core.wire.request`), defaults
that operators set (`core.node_reports.SamplingDefaults`), the library's options, and those of the command line. The
engine has its own declaration without unset values: `neuron.engine.ipc.messages.SamplingParams`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, TypedDict, get_type_hints


@dataclass(frozen=True, slots=True)
class Bounds:
    """The permitted range of a sampling option, including `low` and `high`.

    `high` is None if there is no maximum.
    """

    low: float
    high: float | None = None
    __is_annotated_types_grouped_metadata__: ClassVar[Literal[True]] = True

    # Only pydantic checks the range, through the protocol `GroupedMetadata` of annotated-types. This module does not
    # import pydantic, which is slow, because the command line imports the module.
    def __iter__(self) -> Iterator[Any]:
        from annotated_types import Ge, Le

        yield Ge(self.low)
        if self.high is not None:
            yield Le(self.high)

    def nearest(self, value: float) -> float:
        """Return the number in the range that is nearest to `value`."""
        return max(value, self.low) if self.high is None else min(max(value, self.low), self.high)


@dataclass(frozen=True, kw_only=True)
class RecommendedSampling:
    """The options for which publishers of models recommend values; see `Sampling`."""

    temperature: Annotated[float | None, Bounds(0, 2)] = None
    top_p: Annotated[float | None, Bounds(0, 1)] = None
    top_k: Annotated[int | None, Bounds(-1, 1_000_000)] = None
    min_p: Annotated[float | None, Bounds(0, 1)] = None
    repetition_penalty: Annotated[float | None, Bounds(0.01, 100)] = None


@dataclass(frozen=True, kw_only=True)
class NumericSampling(RecommendedSampling):
    """The options that are numbers; see `Sampling`."""

    max_tokens: Annotated[int | None, Bounds(1)] = None
    frequency_penalty: Annotated[float | None, Bounds(-2, 2)] = None
    presence_penalty: Annotated[float | None, Bounds(-2, 2)] = None
    seed: int | None = None

    @property
    def fixed_seed(self) -> int | None:
        """The seed of reproducible answers, or None if the seed is random."""
        # As in llama.cpp, Ollama and vLLM, clients that always send a seed can send -1 to request a random seed.
        return None if self.seed == -1 else self.seed


@dataclass(frozen=True, kw_only=True)
class Sampling(NumericSampling):
    """Sampling options of a request.

    If an option is None, the operator's value for the model is used, or else the value in the model's files. If neither
    exists, the temperature is 0.7, and other options are off.

    Attributes:
        max_tokens: Maximum number of tokens of an answer. Default: the rest of the context, or a server's own limit.
        temperature: Randomness; 0 always selects the most likely token.
        top_p: Sample from the most likely tokens with this total probability; 1 is off.
        top_k: Sample from this number of most likely tokens; 0 is off.
        min_p: Sample from tokens with at least this probability relative to the most likely token; 0 is off.
        repetition_penalty: Make tokens that already occurred less likely; 1 is off.
        frequency_penalty: Make tokens less likely in proportion to their count; 0 is off.
        presence_penalty: Make tokens that occurred at least once less likely; 0 is off.
        seed: Random seed of reproducible answers. Answer number i (from 0) of a call has the seed plus i. By default,
            and with the seed -1, seeds are random, and completions report them.
        stop: Text, or list of texts, that ends the answer. The answer does not contain the text.
    """

    stop: str | list[str] | None = None


class SamplingOptions(TypedDict, total=False):
    """The fields of `Sampling` as keyword arguments, for type checkers.

    A test checks that this class and `Sampling` have the same options.
    """

    max_tokens: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    repetition_penalty: float | None
    frequency_penalty: float | None
    presence_penalty: float | None
    seed: int | None
    stop: str | list[str] | None


# Permitted ranges by the name of the option. Options without a range are absent.
BOUNDS: Mapping[str, Bounds] = {
    name: metadata
    for name, hint in get_type_hints(Sampling, include_extras=True).items()
    for metadata in getattr(hint, "__metadata__", ())
}
