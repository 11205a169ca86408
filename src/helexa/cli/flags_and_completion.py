"""Options of several commands, and the shell's completion of their values."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from helexa.core.sampling import Sampling
from helexa.generation.target_choice import PRIVATE, ModelLocation
from helexa.neuron.engine_flags import DTYPES, Dtype, EngineFlags

if TYPE_CHECKING:
    from cyclopts.completion import CompletionContext


_TIMEOUT_SECONDS = 0.2


def completion(
    shell: Literal["bash", "zsh", "fish"],
    /,
    *,
    install: Annotated[bool, Parameter(negative="")] = False,
) -> None:
    """Print the script that lets a shell complete `helexa`, or install the script.

    Args:
        shell: The shell.
        install: Write the script to the shell's own folder, and load it in the shell's start-up file.
    """
    from helexa.cli import app

    if install:
        print(app.install_completion(shell=shell))
    else:
        print(app.generate_completion(prog_name="helexa", shell=shell))


def model_names(context: "CompletionContext") -> list[str]:
    """Return the model names that the shell offers as completions.

    If the gateway does not respond within `_TIMEOUT_SECONDS`, the models that only the gateway lists are left out.
    """
    from contextlib import suppress

    from helexa.cli.gateway_client import Gateway
    from helexa.cli.local_model import models_here
    from helexa.core.errors import HelexaError
    from helexa.core.known_models import short_names
    from helexa.neuron.builtin_models import BUILTIN_MODELS

    names = dict.fromkeys([*BUILTIN_MODELS, *short_names()])
    with suppress(HelexaError, OSError):
        names |= dict.fromkeys(model.name for model in models_here())
    with suppress(HelexaError):
        offered = Gateway.from_environment(None).models(_TIMEOUT_SECONDS)
        names |= dict.fromkeys(str(entry["id"]) for entry in offered)
    return list(names)


ModelName = Annotated[str, Parameter(completer=model_names)]
"""A parameter for a model name."""


AskedModel = Annotated[ModelName | None, Parameter(alias="-m")]
AsJson = Annotated[bool, Parameter(name="--json", negative="")]
GatewayUrl = Annotated[
    str | None, Parameter(help="Gateway to ask, else HELEXA_BASE_URL, else that of `helexa up` on this machine.")
]
System = Annotated[str | None, Parameter(alias="-s")]
Think = Annotated[bool | None, Parameter()]
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
        """Return a `ModelLocation` for `model` and these options.

        A `ModelLocation` tells the library which model to run, and on which server or private engine.
        """
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
        """Return arguments of `neuron serve` for these options, without `model_settings`."""
        return [f"{name}" if value is False else f"{name}={value}" for name, value in self.settings().values()]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class SamplingFlags(Sampling):
    """Sampling options.

    Attributes:
        stop: A text that ends the answer. May be given several times.
    """

    stop: Annotated[list[str] | None, Parameter(negative="")] = None
