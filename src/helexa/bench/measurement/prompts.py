"""Prompts that no cache has seen, the same ones for the same seed."""

import random

from helexa.bench.measurement.prompt_request import Turn

# Common words: with the space before it, each is one token in the vocabularies of today's models.
_WORDS = [
    "time",
    "year",
    "people",
    "way",
    "day",
    "man",
    "thing",
    "woman",
    "life",
    "child",
    "world",
    "school",
    "state",
    "family",
    "student",
    "group",
    "country",
    "problem",
    "hand",
    "part",
    "place",
    "case",
    "week",
    "company",
    "system",
    "program",
    "question",
    "work",
    "government",
    "number",
    "night",
    "point",
    "home",
    "water",
    "room",
    "mother",
    "area",
    "money",
    "story",
    "fact",
    "month",
    "lot",
    "right",
    "study",
    "book",
    "eye",
    "job",
    "word",
    "business",
    "issue",
    "side",
    "kind",
    "head",
    "house",
    "service",
    "friend",
    "father",
    "power",
    "hour",
    "game",
    "line",
    "end",
    "member",
    "law",
    "car",
    "city",
    "community",
    "name",
    "president",
    "team",
    "minute",
    "idea",
    "body",
    "information",
    "back",
    "parent",
    "face",
    "others",
    "level",
    "office",
    "door",
    "health",
    "person",
    "art",
    "war",
    "history",
    "party",
    "result",
    "change",
    "morning",
    "reason",
    "research",
    "girl",
    "guy",
    "moment",
    "air",
    "teacher",
    "force",
    "education",
]
_TASK = "\n\nContinue this list of words with as many further words as you can."
_TASK_TOKENS = 14


class Prompts:
    """An endless supply of prompts, none twice.

    Args:
        seed: decides about all words but the first, so that builds can be asked alike.
        salt: decides about the first word, so that no two samples ever ask the same: not even after the database was
            lost, of a server that has gone on running.
    """

    def __init__(self, seed: int, salt: str) -> None:
        self._random = random.Random(seed)
        self._nonces = random.Random(f"{seed}:{salt}")

    def cold(self, tokens: int) -> list[Turn]:
        """A prompt of about so many tokens that differs from all others from its first word on."""
        return [Turn("user", f"{self._nonce()} {self.words(tokens - _TASK_TOKENS)}{_TASK}")]

    def warm(self, prefix: str, tokens: int = 0) -> list[Turn]:
        """A prompt that begins with what the cache has seen and ends with what it has not, of so many tokens more."""
        return [Turn("user", f"{prefix} {self._nonce()} {self.words(tokens)}{_TASK}")]

    def prefix(self, tokens: int) -> str:
        """The beginning that warm prompts share: its own for each supply."""
        return f"{self._nonce()} {self.words(tokens - _TASK_TOKENS)}"

    def words(self, count: int) -> str:
        """So many words; at least one."""
        return " ".join(self._random.choices(_WORDS, k=max(count, 1)))

    def _nonce(self) -> str:
        return "".join(self._nonces.choices("abcdefghijklmnopqrstuvwxyz", k=12))


def sample_seed(seed: int, *names: object) -> int:
    """The seed of one sample: of what these names say."""
    return random.Random("\x00".join(map(str, (seed, *names)))).getrandbits(53)
