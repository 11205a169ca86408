"""Page hashes: a name for what a full page of the KV cache holds, which depends on every token up to its end.

K and V of a position follow from the tokens up to it and from nothing else, so two pages with one hash hold the same.
A hash is H(hash of the page before, the page's tokens). A sequence's first one starts from its salt; the model needs no
part in it, as an engine process serves one model and its hashes die with it.
"""

from array import array
from hashlib import blake2b

_BYTES = 16


def chain_of(salt: str) -> list[bytes]:
    """A chain without pages: what its first page's hash starts from. Chains of different salts never meet."""
    return [blake2b(salt.encode(), digest_size=_BYTES).digest()]


def extend(chain: list[bytes], tokens: list[int], pages: int, page_size: int) -> None:
    """Let `chain` reach over the first `pages` pages of `tokens`: `chain[i + 1]` is the hash of page i."""
    for start in range((len(chain) - 1) * page_size, pages * page_size, page_size):
        digest = blake2b(chain[-1], digest_size=_BYTES)
        digest.update(array("I", tokens[start : start + page_size]))
        chain.append(digest.digest())
