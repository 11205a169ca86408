"""Prompts that are not in any cache, reproducible by seed."""

import random

from helexa.bench.measurement.prompt_request import Turn

# Common words: with a leading space, each is one token in current vocabularies.
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
    """A generator of prompts without repetition.

    Args:
        seed: determines all words except the first word, so that builds receive similar prompts.
        salt: determines the first word, so that no two samples send the same prompt, even if the database was lost and
            the server kept running.
    """

    def __init__(self, seed: int, salt: str) -> None:
        self._random = random.Random(seed)
        self._nonces = random.Random(f"{seed}:{salt}")

    def cold(self, tokens: int) -> list[Turn]:
        """Return a prompt of about `tokens` tokens that differs from all others in its first word."""
        return [Turn("user", f"{self._nonce()} {self.words(tokens - _TASK_TOKENS)}{_TASK}")]

    def warm(self, prefix: str, tokens: int = 0) -> list[Turn]:
        """Return a prompt that begins with the cached `prefix` and continues with about `tokens` new tokens."""
        return [Turn("user", f"{prefix} {self._nonce()} {self.words(tokens)}{_TASK}")]

    def prefix(self, tokens: int) -> str:
        """Return a beginning that warm prompts share; it is unique to this generator."""
        return f"{self._nonce()} {self.words(tokens - _TASK_TOKENS)}"

    def words(self, count: int) -> str:
        """Return `count` words, at least one."""
        return " ".join(self._random.choices(_WORDS, k=max(count, 1)))

    def _nonce(self) -> str:
        return "".join(self._nonces.choices("abcdefghijklmnopqrstuvwxyz", k=12))


def sample_seed(seed: int, *names: object) -> int:
    """Return the random seed of one sample, derived from `names`."""
    return random.Random("\x00".join(map(str, (seed, *names)))).getrandbits(53)
