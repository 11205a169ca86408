"""Random requests for the simulation of a fleet: conversations of agents. The same seed yields the same requests."""

import random
from dataclasses import dataclass
from itertools import accumulate

from helexa.core.catalog import Catalog

SIZES_MB = (4_000, 5_000, 6_500, 8_000, 9_000, 10_000, 12_000, 14_000, 15_000, 18_000, 21_000, 40_000)
"""GPU memory that each model needs, in MB."""

ZIPF = 1.1
TURNS = 8
SYSTEM_TOKENS = (1_000, 4_000)
USER_TOKENS = (50, 1_500)
ANSWER_TOKENS = (30, 400)
PAUSE_SECS = 4.0


@dataclass(frozen=True)
class Turn:
    """One request of a conversation.

    Attributes:
        new: number of prompt tokens that are neither in the previous request nor in its response.
        answer_tokens: number of output tokens.
        pause_secs: seconds from the end of the previous response to this request; 0 for the first request.
    """

    new: int
    answer_tokens: int
    pause_secs: float


@dataclass(frozen=True)
class Conversation:
    """All requests of one agent to one model. `begins` is the simulated time of the first request, in seconds."""

    name: str
    model: str
    begins: float
    turns: tuple[Turn, ...]


def models(count: int) -> Catalog:
    """Return a catalog of `count` models, `m0`, `m1` and so on. `m0` gets the most requests, `m1` the second most."""
    order = random.Random(count).sample(range(len(SIZES_MB)), len(SIZES_MB))
    return Catalog.model_validate({"models": [{"id": f"m{i}", "vram_mb": SIZES_MB[order[i]]} for i in range(count)]})


def conversations(seed: int, catalog: Catalog, secs: float, per_minute: float) -> list[Conversation]:
    """Return random conversations that begin within `secs` seconds, on average `per_minute` per minute."""
    rng = random.Random(seed)
    ids = [profile.id for profile in catalog.models]
    weights = list(accumulate(1 / rank**ZIPF for rank in range(1, len(ids) + 1)))
    generated: list[Conversation] = []
    begins = rng.expovariate(per_minute / 60)
    while begins < secs:
        turns = 1 + min(int(rng.expovariate(1 / TURNS)), 4 * TURNS)
        model = rng.choices(ids, cum_weights=weights)[0]
        generated.append(
            Conversation(f"c{len(generated)}", model, begins, tuple(_turn(rng, at == 0) for at in range(turns)))
        )
        begins += rng.expovariate(per_minute / 60)
    return generated


def _turn(rng: random.Random, first: bool) -> Turn:
    new = rng.randint(*USER_TOKENS) + (rng.randint(*SYSTEM_TOKENS) if first else 0)
    return Turn(new, rng.randint(*ANSWER_TOKENS), 0.0 if first else rng.expovariate(1 / PAUSE_SECS))
