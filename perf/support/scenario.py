"""Functions for benchmarks that run an engine process without a server: engine, timed requests and command line."""

import argparse
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from helexa.core.errors import HelexaError
from helexa.neuron.engine.ipc.engine_options import EngineOptions
from helexa.neuron.engine.ipc.messages import SamplingParams
from helexa.neuron.engine_client.client import EngineClient
from support.local_model import local_path

GREEDY = SamplingParams(temperature=0)


@dataclass
class TimedAnswer:
    """The output of one request, with arrival times. Times are seconds of `time.perf_counter`.

    The engine sends output in chunks of one or several tokens.

    Attributes:
        requested_at: time of the request.
        tokens: the output tokens so far.
        cached: number of prompt tokens found in the prefix cache.
        arrivals: arrival time of each chunk.
        first: number of tokens in the first chunk.
    """

    requested_at: float = field(default_factory=time.perf_counter)
    tokens: list[int] = field(default_factory=list[int])
    cached: int = 0
    arrivals: list[float] = field(default_factory=list[float])
    first: int = 0

    @property
    def ttft_ms(self) -> float:
        """Time from the request to the first token, in milliseconds."""
        return 1000 * (self.arrivals[0] - self.requested_at)

    @property
    def tok_s(self) -> float:
        """Decode rate in tokens per second, counted from the arrival of the first chunk."""
        return (len(self.tokens) - self.first) / (self.arrivals[-1] - self.arrivals[0])


@asynccontextmanager
async def engine(model: Path, options: EngineOptions) -> AsyncIterator[EngineClient]:
    """Run an engine process with one model during the `with` block."""
    try:
        client = await EngineClient.start(model, options)
    except HelexaError as error:
        raise SystemExit(str(error)) from None
    try:
        yield client
    finally:
        await client.close()


async def ask(
    client: EngineClient,
    prompt: list[int],
    tokens: int,
    sampling: SamplingParams = GREEDY,
    answer: TimedAnswer | None = None,
) -> TimedAnswer:
    """Generate exactly `tokens` tokens after `prompt`, and return them with their arrival times.

    If `answer` is given, the function adds tokens to it as they arrive, so that the caller can watch the progress.
    """
    answer = answer or TimedAnswer()
    async with aclosing(client.generate(prompt, max_tokens=tokens, sampling=sampling)) as stream:
        async for output in stream:
            if output.error:
                raise SystemExit(f"the engine refused: {output.error}")
            answer.tokens += output.tokens
            answer.cached += output.cached_tokens
            answer.first = answer.first or len(answer.tokens)
            answer.arrivals.append(time.perf_counter())
    return answer


def require_context(client: EngineClient, positions: int) -> None:
    """Exit with an error message if the model's context is shorter than `positions` tokens."""
    limit = client.ready.context_length
    if positions > limit:
        raise SystemExit(f"this needs {positions} positions, the model takes {limit}: take another, or ask for less")


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return a command line parser with the common options of these benchmarks: MODEL, `--threads`, `--rounds`."""
    argument_parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    argument_parser.add_argument("model", nargs="?", type=model_argument, default="helexa/small")
    argument_parser.add_argument("--threads", type=int, default=2, help="0 for one per physical core")
    argument_parser.add_argument("--rounds", type=int, default=5)
    return argument_parser


def model_argument(text: str) -> Path:
    """Return the local path of the model that the command line argument MODEL names."""
    try:
        return local_path(text)
    except HelexaError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
