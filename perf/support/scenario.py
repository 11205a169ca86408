"""Functions shared by the scenario benchmarks: engine process, timed answers, verdicts."""

import argparse
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from helexa.core.errors import HelexaError
from helexa.neuron.engine.ipc.messages import EngineOptions, SamplingParams
from helexa.neuron.engine_client.client import EngineClient
from support.local_model import local_path

GREEDY = SamplingParams(temperature=0)


@dataclass
class TimedAnswer:
    """One answer with the time of its request, and the times (`time.perf_counter`) and counts of its tokens.

    Attributes:
        cached: number of prompt tokens found in the cache.
    """

    requested_at: float = field(default_factory=time.perf_counter)
    tokens: list[int] = field(default_factory=list[int])
    cached: int = 0
    arrivals: list[float] = field(default_factory=list[float])
    first: int = 0

    @property
    def ttft_ms(self) -> float:
        """Milliseconds to the first token."""
        return 1000 * (self.arrivals[0] - self.requested_at)

    @property
    def tok_s(self) -> float:
        """Tokens per second after the first tokens."""
        return (len(self.tokens) - self.first) / (self.arrivals[-1] - self.arrivals[0])


@asynccontextmanager
async def engine(model: Path, options: EngineOptions) -> AsyncIterator[EngineClient]:
    """Run an engine process that serves one model until the block ends."""
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
    """Continue `prompt` by exactly `tokens` tokens.

    The tokens go to `answer`, if given, so that other code can watch the progress.
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
    """Exit if the model's context is smaller than `positions`."""
    limit = client.ready.context_length
    if positions > limit:
        raise SystemExit(f"this needs {positions} positions, the model takes {limit}: take another, or ask for less")


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return the command line parser shared by all scenarios: MODEL, `--threads` and `--rounds`."""
    argument_parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    argument_parser.add_argument("model", nargs="?", type=model_argument, default="helexa/small")
    argument_parser.add_argument("--threads", type=int, default=2, help="0 for one per physical core")
    argument_parser.add_argument("--rounds", type=int, default=5)
    return argument_parser


def model_argument(text: str) -> Path:
    """Return the local path of the model."""
    try:
        return local_path(text)
    except HelexaError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
