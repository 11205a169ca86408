"""Explains why a prompt was computed again although an earlier prompt is similar."""

from array import array
from collections import OrderedDict
from collections.abc import Callable, Mapping
from hashlib import blake2b
from itertools import count

import numpy as np

from helexa.neuron.engine.ipc.messages import CachedPrefixes, PrefixMiss
from helexa.neuron.engine.scheduling.page_allocation_and_prefix_hits import Memory
from helexa.neuron.engine.scheduling.sequence import Sequence
from helexa.neuron.engine.step_input_and_graph_sizes import Int32

# Minimum number of tokens that a prompt must compute before a `PrefixMiss` is reported. Only prompts with at least as
# many tokens are recorded.
LEAST_MISSED = 512

_MOST_TOKENS = 1 << 20  # maximum number of tokens of all recorded prompts together, which take 4 MiB
_MOST_PROMPTS = 64
_MOST_KEYS = 256


class RecentPrompts:
    """The latest long prompts of an engine, of all principals.

    A prompt is compared only with earlier prompts of the same principal. A `PrefixMiss` therefore reveals nothing about
    other principals.
    """

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._prompts: OrderedDict[int, tuple[str, Int32]] = OrderedDict()  # principal and tokens, oldest first
        self._numbers = count()
        self._tokens = 0
        self._keys: OrderedDict[str, bytes] = OrderedDict()  # prefix key -> hash of the prompt's middle page

    def explain(self, sequence: Sequence) -> PrefixMiss | None:
        """Return why a starting sequence must compute many tokens again; else None.

        The prompt is compared with the most similar earlier prompt of the same principal. Many means at least
        `LEAST_MISSED` tokens, either of the common beginning, if the cache lacks them, or after the first difference.
        """
        length, cached = len(sequence.tokens), sequence.computed
        if length - cached < LEAST_MISSED or not self._memory.may_reuse(sequence):
            return None
        others = [tokens for principal, tokens in self._prompts.values() if principal == sequence.principal]
        if not others:
            return None
        prompt = _marked(sequence)
        common, similar = max(((_common(prompt, other), len(other)) for other in others), key=lambda pair: pair[0])
        if common - cached >= self._memory.most_lost(LEAST_MISSED):
            return PrefixMiss(position=cached, reason="no_state" if self._memory.has_page(sequence) else "evicted")
        if common and min(length, similar) - common >= LEAST_MISSED:
            return PrefixMiss(position=common, reason="changed")
        return None

    def remember(self, sequence: Sequence) -> None:
        """Record a prefilled prompt, unless it is short or may not use cached pages."""
        if len(sequence.request.prompt) < LEAST_MISSED or not self._memory.may_reuse(sequence):
            return
        if key := sequence.request.prefix_key:
            sequence.half_page = self._memory.half_page(sequence)
            self._keys[key] = sequence.half_page
            self._keys.move_to_end(key)
            if len(self._keys) > _MOST_KEYS:
                self._keys.popitem(last=False)
        prompt = _marked(sequence)
        for number, (principal, other) in list(self._prompts.items()):
            if principal == sequence.principal and _common(prompt, other) == len(other):
                self._forget(number)  # the new prompt begins with the whole earlier prompt
        self._prompts[next(self._numbers)] = sequence.principal, prompt
        self._tokens += len(prompt)
        while self._tokens > _MOST_TOKENS or len(self._prompts) > _MOST_PROMPTS:
            self._forget(next(iter(self._prompts)))

    def prefixes(self, saved: Mapping[str, bytes], on_disk: Callable[[bytes], bool]) -> CachedPrefixes:
        """Return the prefix keys of prompts whose first half is in memory or on disk.

        Args:
            saved: hashes of pages on disk by prefix key, from earlier engines.
            on_disk: returns whether the page with a hash is on disk.
        """
        tiers = CachedPrefixes()
        for key, page_hash in {**saved, **self._keys}.items():
            if self._memory.holds(page_hash):
                tiers.memory.append(key)
            elif on_disk(page_hash):
                tiers.disk.append(key)
        return CachedPrefixes(tiers.memory[-_MOST_KEYS:], tiers.disk[-_MOST_KEYS:])

    def clear(self) -> None:
        """Forget all prompts."""
        self._prompts.clear()
        self._keys.clear()
        self._tokens = 0

    def _forget(self, number: int) -> None:
        self._tokens -= len(self._prompts.pop(number)[1])


def _marked(sequence: Sequence) -> Int32:
    """Return the prompt, int32 [n], with a digest as the first token of each image."""
    tokens = array("i", sequence.request.prompt)
    if sequence.images is not None:
        for image_range in sequence.images.ranges:
            key = sequence.images.key(image_range.start, image_range.end)
            tokens[image_range.start] = int.from_bytes(blake2b(key, digest_size=4).digest(), signed=True)
    return np.frombuffer(tokens, np.int32)


def _common(prompt: Int32, other: Int32) -> int:
    """Return the number of equal leading tokens of `prompt` and `other`."""
    shorter = min(len(prompt), len(other))
    if prompt[0] != other[0]:
        return 0
    equal = prompt[:shorter] == other[:shorter]
    return shorter if equal.all() else int(equal.argmin())
