"""What prefix reuse saves: the time to the first token, and the work of an agent's conversation, as JSON lines.

usage: python perf/reuse.py [MODEL] [--threads 2] [--rounds 5] [--system 6000] [--turns 10]

`ttft` asks for one token after 2,048 tokens of prompt that the engine has never seen and 16 more, then again with 16
others behind the same 2,048. One line per way with the median and each round's milliseconds; the verdict is how large a
part of the cold time the cached one takes.

`conversation` is an agent's: a system prompt with tools of `--system` tokens, then in each of `--turns` turns a message
or a tool's result of 400 to 600 tokens, answered with 60. Each turn sends everything before it again. One line per
turn; the verdict is how many tokens the engine computed for each distinct one. It takes a context of about 11,600
tokens, so a model of less needs a shorter `--system`; `--turns 0` leaves it out.

Prompts are token ids drawn at random; the engine is a process of its own, talked to without HTTP.
"""

import random
from pathlib import Path
from statistics import median

from rows import prompt
from scenario import ask, engine, parser, require_context
from serving import run, say, verdict

from helexa.neuron.engine.ipc.messages import EngineOptions
from helexa.neuron.engine_client.client import EngineClient

PREFIX, QUESTION = 2048, 16
TURN_TOKENS, ANSWER_TOKENS = (400, 600), 60
TTFT_BAR, COMPUTED_BAR = 0.1, 1.15


async def first_tokens(client: EngineClient, rounds: int) -> None:
    """Ask cold and cached in turns, then print."""
    require_context(client, PREFIX + QUESTION + 1)
    cold_ms: list[float] = []
    cached_ms: list[float] = []
    cached = 0
    for _ in range(rounds):
        prefix = prompt(PREFIX)
        cold_ms.append((await ask(client, prefix + prompt(QUESTION), 1)).ttft_ms)
        again = await ask(client, prefix + prompt(QUESTION), 1)
        cached_ms.append(again.ttft_ms)
        cached = again.cached
    say(row="ttft cold", ms=median(cold_ms), runs=cold_ms)
    say(row="ttft cached", ms=median(cached_ms), cached_tokens=cached, runs=cached_ms)
    part = median(warm / cold for warm, cold in zip(cached_ms, cold_ms, strict=True))
    verdict("ttft, cached / cold", part, f"<= {TTFT_BAR}", part <= TTFT_BAR)


async def conversation(client: EngineClient, system: int, turns: int) -> None:
    """Hold one conversation and print its turns."""
    sizes = random.Random(turns)
    messages = [sizes.randint(*TURN_TOKENS) for _ in range(turns)]
    require_context(client, system + sum(messages) + turns * ANSWER_TOKENS)
    history = prompt(system)
    computed = 0
    for turn, size in enumerate(messages, 1):
        history += prompt(size)
        answer = await ask(client, history, ANSWER_TOKENS)
        # The last token is known without having been computed; the next turn computes it.
        computed += len(history) - answer.cached + len(answer.tokens) - 1
        say(row=f"turn {turn}", prompt_tokens=len(history), cached_tokens=answer.cached, ttft_ms=answer.ttft_ms)
        history += answer.tokens
    part = computed / len(history)
    verdict("conversation, computed / distinct tokens", part, f"< {COMPUTED_BAR}", part < COMPUTED_BAR)


async def measure(model: Path, threads: int, rounds: int, system: int, turns: int) -> None:
    """Run both parts on one engine."""
    async with engine(model, EngineOptions(threads=threads)) as client:
        await ask(client, prompt(512), 8)  # warm up
        await first_tokens(client, rounds)
        if turns:
            await conversation(client, system, turns)


def main() -> None:
    """Read the command line."""
    command = parser(__doc__)
    command.add_argument("--system", type=int, default=6000)
    command.add_argument("--turns", type=int, default=10)
    arguments = command.parse_args()
    run(measure(arguments.model, arguments.threads, arguments.rounds, arguments.system, arguments.turns))


if __name__ == "__main__":
    main()
