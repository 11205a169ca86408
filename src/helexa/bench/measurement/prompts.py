"""Generates random prompts. A prompt hits a prefix cache only if the benchmark intends a cache hit."""

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
    """Generates prompts of random words. Each prompt begins with a unique word, so it cannot hit a prefix cache.

    Args:
        seed: determines all words except the unique words. With the same seed, all builds receive prompts that differ
            only in the unique words.
        salt: determines the unique words. The salt should be random for each sample. Otherwise, measurements with a new
            database would repeat earlier prompts, which the server may still have in its prefix cache.
    """

    def __init__(self, seed: int, salt: str) -> None:
        self._random = random.Random(seed)
        self._nonces = random.Random(f"{seed}:{salt}")

    def cold(self, tokens: int) -> list[Turn]:
        """Return a prompt of about `tokens` tokens that shares no prefix with other prompts."""
        return [Turn("user", f"{self._nonce()} {self.words(tokens - _TASK_TOKENS)}{_TASK}")]

    def warm(self, prefix: str, tokens: int = 0) -> list[Turn]:
        """Return a prompt that begins with `prefix` and continues with about `tokens` new tokens."""
        return [Turn("user", f"{prefix} {self._nonce()} {self.words(tokens)}{_TASK}")]

    def prefix(self, tokens: int) -> str:
        """Return a unique text of about `tokens` tokens, as the common prefix of several prompts."""
        return f"{self._nonce()} {self.words(tokens - _TASK_TOKENS)}"

    def words(self, count: int) -> str:
        """Return a text of `count` random words, at least one."""
        return " ".join(self._random.choices(_WORDS, k=max(count, 1)))

    def _nonce(self) -> str:
        return "".join(self._nonces.choices("abcdefghijklmnopqrstuvwxyz", k=12))


def sample_seed(seed: int, *names: object) -> int:
    """Return the random seed of a sample, derived from `seed` and from `names`, which identify the sample."""
    return random.Random("\x00".join(map(str, (seed, *names)))).getrandbits(53)
