"""Measure how much the prefix cache saves: time to the first token, and an agent's conversation, as JSON lines.


usage: python perf/reuse.py [MODEL] [--threads 2] [--rounds 5] [--system 6000] [--turns 10]

The script runs two measurements on an engine process, without HTTP. Prompts are random token ids.

* Time to the first token: each round requests one token after a new prefix of 2,048 prompt tokens and 16 more tokens
  (cold), then one token after the same prefix and 16 other tokens (cached). There is one line for each of the two cases
  with the median and all values in milliseconds. The verdict is the cached time divided by the cold time.
* An agent's conversation: it starts with a system prompt and tools of `--system` tokens. Each of `--turns` turns adds a
  user message or tool result of 400 to 600 tokens and an answer of 60 tokens. Its request contains all earlier turns.
  There is one line per turn. The verdict is the number of computed tokens divided by the number of distinct tokens.

The conversation needs a context of about 11,600 tokens. For models with a smaller context, use a smaller `--system`, or
`--turns 0` to skip the conversation.
"""

import random
from pathlib import Path
from statistics import median

from support.output import print_line, print_verdict, run
from support.rows import prompt
from support.scenario import ask, engine, parser, require_context

from helexa.neuron.engine.ipc.engine_options import EngineOptions
from helexa.neuron.engine_client.client import EngineClient

PREFIX, SUFFIX = 2048, 16
TURN_TOKENS, ANSWER_TOKENS = (400, 600), 60
TTFT_THRESHOLD, COMPUTED_THRESHOLD = 0.1, 1.15


async def first_tokens(client: EngineClient, rounds: int) -> None:
    """Measure the time to the first token without and with a prefix cache hit, alternately, then print the results."""
    require_context(client, PREFIX + SUFFIX + 1)
    cold_ms: list[float] = []
    cached_ms: list[float] = []
    cached = 0
    for _ in range(rounds):
        prefix = prompt(PREFIX)
        cold_ms.append((await ask(client, prefix + prompt(SUFFIX), 1)).ttft_ms)
        answer = await ask(client, prefix + prompt(SUFFIX), 1)
        cached_ms.append(answer.ttft_ms)
        cached = answer.cached
    print_line(row="ttft cold", ms=median(cold_ms), runs=cold_ms)
    print_line(row="ttft cached", ms=median(cached_ms), cached_tokens=cached, runs=cached_ms)
    ratio = median(warm / cold for warm, cold in zip(cached_ms, cold_ms, strict=True))
    print_verdict("ttft, cached / cold", ratio, f"<= {TTFT_THRESHOLD}", ratio <= TTFT_THRESHOLD)


async def conversation(client: EngineClient, system: int, turns: int) -> None:
    """Run an agent's conversation and print a line for each of its turns.

    Args:
        client: the engine.
        system: number of tokens of the system prompt.
        turns: number of requests.
    """
    sizes = random.Random(turns)
    messages = [sizes.randint(*TURN_TOKENS) for _ in range(turns)]
    require_context(client, system + sum(messages) + turns * ANSWER_TOKENS)
    history = prompt(system)
    computed = 0
    for turn, size in enumerate(messages, 1):
        history += prompt(size)
        answer = await ask(client, history, ANSWER_TOKENS)
        # The engine has sampled the last token but not computed its K and V; the next turn computes them.
        computed += len(history) - answer.cached + len(answer.tokens) - 1
        print_line(row=f"turn {turn}", prompt_tokens=len(history), cached_tokens=answer.cached, ttft_ms=answer.ttft_ms)
        history += answer.tokens
    ratio = computed / len(history)
    print_verdict(
        "conversation, computed / distinct tokens", ratio, f"< {COMPUTED_THRESHOLD}", ratio < COMPUTED_THRESHOLD
    )


async def measure(model: Path, threads: int, rounds: int, system: int, turns: int) -> None:
    """Run both measurements (see the module) on one engine."""
    async with engine(model, EngineOptions(threads=threads)) as client:
        await ask(client, prompt(512), 8)  # warm up
        await first_tokens(client, rounds)
        if turns:
            await conversation(client, system, turns)


def main() -> None:
    command = parser(__doc__)
    command.add_argument("--system", type=int, default=6000)
    command.add_argument("--turns", type=int, default=10)
    arguments = command.parse_args()
    run(measure(arguments.model, arguments.threads, arguments.rounds, arguments.system, arguments.turns))


if __name__ == "__main__":
    main()
