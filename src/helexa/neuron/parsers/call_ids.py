"""Formats of the ids of tool calls."""

import hashlib
import re
import secrets
import string
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class CallIdFormat:
    """A format of ids: a prefix, and `length` characters of `alphabet`."""

    # pattern of all ids that chat templates with this format accept, including ids of other servers
    accepted: re.Pattern[str]
    prefix: str
    alphabet: str
    length: int

    def random(self) -> str:
        """Return a new random id."""
        return self.prefix + "".join([secrets.choice(self.alphabet) for _ in range(self.length)])

    def derived(self, seed: str) -> str:
        """Return an id that depends only on `seed`: a repeated prompt has the same ids."""
        number = int.from_bytes(hashlib.sha256(seed.encode("utf-8", "surrogatepass")).digest())
        characters: list[str] = []
        for _ in range(self.length):
            number, index = divmod(number, len(self.alphabet))
            characters.append(self.alphabet[index])
        return self.prefix + "".join(characters)


OPENAI_IDS = CallIdFormat(re.compile(r"[A-Za-z0-9_.:|-]{1,64}"), "call_", "0123456789abcdef", 24)
MISTRAL_IDS = CallIdFormat(re.compile(r"[A-Za-z0-9]{9}"), "", string.ascii_letters + string.digits, 9)


class CallIds:
    """The ids of the tool calls in one conversation, which are unique.

    The first call with an acceptable id keeps the id. All other calls get an id that is derived from their own id.

    Args:
        id_format: format of the ids that the chat template accepts.
        given: the ids that the client sent for the calls of the conversation.
    """

    def __init__(self, id_format: CallIdFormat, given: Iterable[str]) -> None:
        self._format = id_format
        self._kept = {id for id in given if id_format.accepted.fullmatch(id)}
        self._assigned = set[str]()
        self._derived: dict[str, int] = {}  # number of ids that were derived from each id of the client

    def assign(self, given: str) -> str:
        """Return the id for the next call, whose id in the client's request is `given`."""
        id = given
        if id not in self._kept or id in self._assigned:
            id = self._derive(given)
        self._assigned.add(id)
        return id

    def _derive(self, given: str) -> str:
        while True:
            number = self._derived.get(given, 0)
            self._derived[given] = number + 1
            id = self._format.derived(f"{number}:{given}")
            if id not in self._kept and id not in self._assigned:
                return id
