"""What the scenario benchmarks share: an engine process of their own, timed answers, a verdict."""

import argparse
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from local_model import local_path

from helexa.core.errors import HelexaError
from helexa.neuron.engine.ipc.messages import EngineOptions, SamplingParams
from helexa.neuron.engine_client.client import EngineClient

GREEDY = SamplingParams(temperature=0)


@dataclass
class Answer:
    """One answer as it arrives: when it was asked for, and when (`time.perf_counter`) how many tokens came.

    Attributes:
        cached: prompt tokens that the engine did not compute.
    """

    asked: float = field(default_factory=time.perf_counter)
    tokens: list[int] = field(default_factory=list[int])
    cached: int = 0
    arrivals: list[float] = field(default_factory=list[float])
    first: int = 0

    @property
    def ttft_ms(self) -> float:
        """Milliseconds to the first token."""
        return 1000 * (self.arrivals[0] - self.asked)

    @property
    def tok_s(self) -> float:
        """Tokens per second after the first ones."""
        return (len(self.tokens) - self.first) / (self.arrivals[-1] - self.arrivals[0])


@asynccontextmanager
async def engine(model: Path, options: EngineOptions) -> AsyncIterator[EngineClient]:
    """An engine process that serves one model; it ends with the block."""
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
    answer: Answer | None = None,
) -> Answer:
    """Continue `prompt` by exactly `tokens` tokens; into `answer`, if somebody wants to look on."""
    answer = answer or Answer()
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
    """End the benchmark if the model takes fewer positions than it needs."""
    limit = client.ready.context_length
    if positions > limit:
        raise SystemExit(f"this needs {positions} positions, the model takes {limit}: take another, or ask for less")


def parser(description: str | None) -> argparse.ArgumentParser:
    """The command line that every scenario has: MODEL, `--threads` and `--rounds`."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("model", nargs="?", type=model_argument, default="helexa/small")
    made.add_argument("--threads", type=int, default=2, help="0 for one per physical core")
    made.add_argument("--rounds", type=int, default=5)
    return made


def model_argument(text: str) -> Path:
    """Where the model lies."""
    try:
        return local_path(text)
    except HelexaError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
